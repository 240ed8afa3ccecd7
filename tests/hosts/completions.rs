//! llama-server: greedy completions, token by token and with their probabilities, equal to stock's.

use serde_json::{Value, json};

use crate::sides::equal;
use crate::support::process::Finished;
use crate::support::server::{Completion, Server};
use crate::support::{fixture, fixture_model, text};

const PROMPTS: [&str; 4] = [
    "The function returns",
    "## What is ownership?\n\nOwnership is a set of rules that",
    "import os\nfor name in os.listdir('.'):\n    print(",
    "A list is a mutable sequence. A tuple is",
];

/// What four prompts with one long beginning ask at once, and what the server answers.
fn together(server: &Server) -> Vec<Value> {
    let text = std::fs::read_to_string(fixture("eval.txt")).expect("the fixture can be read");
    let shared: String = text.chars().take(700).collect();
    let prompts: Vec<String> = PROMPTS.iter().map(|prompt| format!("{shared}\n\n{prompt}")).collect();
    // One request with four prompts: they enter the four slots in one step, so that each pass holds the same tokens on every run.
    let body = json!({
        "prompt": prompts, "n_predict": 24, "temperature": 0, "seed": 1, "return_tokens": true, "cache_prompt": true,
    });
    let mut answers = server.post("/completion", &body).as_array().expect("one answer per prompt").clone();
    answers.sort_by_key(|answer| answer["index"].as_u64());
    answers.iter().map(|answer| answer["tokens"].clone()).collect()
}

fn both<T: PartialEq + std::fmt::Debug>(arguments: &[&str], ask: impl Fn(&Server) -> T) -> (T, Finished) {
    equal(&fixture_model(), arguments, ask)
}

#[test]
fn greedy_tokens_and_probabilities_equal_stock() {
    let (answers, _) = both(&["-c", "1024", "-np", "1"], |server| {
        PROMPTS.iter().map(|prompt| server.complete(prompt, 32, 5)).collect::<Vec<Completion>>()
    });
    let candidates = answers[0].probabilities[0]["top_logprobs"].as_array().map(Vec::len);
    assert_eq!(candidates, Some(5), "probabilities were compared: {:?}", answers[0]);
}

#[test]
fn chat_answers_equal_stock() {
    let body = json!({
        "messages": [{"role": "user", "content": "What is a dictionary in Python?"}],
        "max_tokens": 24, "temperature": 0, "seed": 1,
    });
    let (answer, _) = both(&["-c", "1024", "-np", "1"], |server| {
        server.post("/v1/chat/completions", &body)["choices"][0]["message"]["content"].clone()
    });
    assert!(answer.as_str().is_some_and(|content| content.len() > 20), "an answer was compared: {answer}");
}

#[test]
fn four_slots_with_a_shared_prefix_equal_stock() {
    let (answers, _) = both(&["-c", "4096", "-np", "4"], |server| (together(server), together(server)));
    assert_eq!(answers.0.len(), PROMPTS.len());
    assert!(answers.0.iter().chain(&answers.1).all(|tokens| tokens.as_array().is_some_and(|list| list.len() == 24)));
}

#[test]
fn four_slots_with_one_shared_cache_equal_stock() {
    both(&["-c", "4096", "-np", "4", "-kvu"], |server| (together(server), together(server)));
}

/// Two models in one process: the same weights once as the target and once as the draft of speculative decoding.
#[test]
fn a_draft_model_on_the_same_device_equals_stock() {
    let model = fixture_model();
    let draft =
        ["-c", "1024", "-np", "1", "-md", text(&model), "--spec-draft-n-max", "4", "--spec-type", "draft-simple"];
    let (answers, finished) = both(&draft, |server| {
        let answer = server.post(
            "/completion",
            &json!({"prompt": PROMPTS[1], "n_predict": 32, "temperature": 0, "seed": 1, "return_tokens": true}),
        );
        (answer["tokens"].clone(), answer["timings"]["draft_n"].clone())
    });
    assert!(answers.1.as_u64().is_some_and(|drafted| drafted > 0), "nothing was drafted: {answers:?}");
    let backends = crate::summary::summaries(&finished.log()).len();
    assert!(backends >= 2, "{}", finished.report("the draft model had no backend of ours"));
}
