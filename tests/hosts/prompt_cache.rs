//! Prompts that a server keeps: the beginning of the last one in its slot, and earlier ones in RAM, read back from the device and
//! written to it again.

use serde_json::{Value, json};

use crate::sides::equal;
use crate::support::server::Server;
use crate::support::{fixture, fixture_model};

/// Two prompts of some hundred tokens that have no beginning in common.
fn prompts() -> [String; 2] {
    let text = std::fs::read_to_string(fixture("eval.txt")).expect("the fixture can be read");
    [0, 2000].map(|start| text.chars().skip(start).take(900).collect())
}

/// Tokens with their probabilities, and how many tokens of the prompt were not computed again.
fn ask(server: &Server, prompt: &str) -> (Value, Value, Option<u64>) {
    let body = json!({
        "prompt": prompt, "n_predict": 16, "n_probs": 3, "temperature": 0, "seed": 1, "return_tokens": true,
        "cache_prompt": true,
    });
    let answer = server.post("/completion", &body);
    (answer["tokens"].clone(), answer["completion_probabilities"].clone(), answer["timings"]["cache_n"].as_u64())
}

/// One prompt, the same with more behind it, another one, and the first again.
fn in_turn(server: &Server) -> [(Value, Value, Option<u64>); 4] {
    let [first, second] = prompts();
    [first.clone(), format!("{first}\n\nA list is"), second, first].map(|prompt| ask(server, &prompt))
}

#[test]
fn prompts_kept_in_ram_equal_stock() {
    let (answers, _) = equal(&fixture_model(), &["-c", "1024", "-np", "1", "--cache-ram", "64"], in_turn);
    let kept = answers.each_ref().map(|(_, _, kept)| kept.unwrap_or(0));
    assert!(kept[0] == 0 && kept[1] > 100 && kept[2] < 100, "the slot keeps the last prompt: {kept:?}");
    assert!(kept[3] > 100, "the first prompt came back from RAM: {kept:?}");
    assert_eq!(answers[3].0, answers[0].0);
}

#[test]
fn prompts_not_kept_in_ram_equal_stock() {
    let (answers, _) = equal(&fixture_model(), &["-c", "1024", "-np", "1", "--cache-ram", "0"], in_turn);
    let kept = answers.each_ref().map(|(_, _, kept)| kept.unwrap_or(0));
    assert!(kept[1] > 100 && kept[3] < 100, "only the slot keeps a prompt: {kept:?}");
}
