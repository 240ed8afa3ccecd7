//! Bad input and failing machines: the host ends with an error of its own or goes on; it never crashes.

use std::fs;
use std::path::Path;
use std::time::Duration;

use crate::perplexity::{figures, perplexity};
use crate::support::gguf::Header;
use crate::support::process::{Finished, run};
use crate::support::server::Server;
use crate::support::stock::{OVER_CPU, Side, command, folder, tool};
use crate::support::{fixture, fixture_model, text};

const LIMIT: Duration = Duration::from_secs(60);

/// A short run with these keys; it must end well.
fn short(keys: &str) -> Finished {
    perplexity(Side::Plugin { keys, device: "MoE0" }, 2, 1, &[])
}

/// The run ends well and says, in one line at the host's default verbosity, all of `words`.
fn says(keys: &str, words: &[&str]) {
    let finished = short(keys);
    let lines = finished.lines_with("ggml-moe: settings: ");
    let found = lines.iter().any(|line| words.iter().all(|word| line.contains(word)));
    assert!(found, "{}", finished.report(&format!("no line with {words:?} in {lines:?}")));
}

#[test]
fn an_unknown_key_gets_a_suggestion_and_the_list() {
    says("inne=CPU", &["unknown key \"inne\"", "did you mean \"inner\"?", "keys: inner, log", "ctx-share"]);
}

#[test]
fn a_key_like_no_other_gets_the_list_alone() {
    says("inner=CPU;zzzzzzzzzzzz=1", &["unknown key \"zzzzzzzzzzzz\"", "keys: inner, log"]);
}

#[test]
fn an_unknown_value_is_named_with_its_key() {
    says("inner=CPU;log=loud", &["log", "loud", "error", "notice", "info", "debug"]);
}

#[test]
fn a_number_out_of_range_is_named_with_its_range() {
    says("inner=CPU;ctx-share=7", &["ctx-share", "7", "0", "1"]);
}

#[test]
fn good_keys_hold_beside_bad_ones() {
    let finished = short("inner=CPU;zzz=1;log=debug");
    crate::summary::ran_in_blocks(&finished);
}

#[test]
fn hostile_key_texts_are_survived() {
    let long = "x".repeat(100_000);
    for keys in
        ["=", ";;;,,,", "inner", "inner=", "=CPU", "inner=CPU;inner=CPU", "log=debug=info", "\u{fffd}=\u{1F980}", &long]
    {
        let finished = short(keys);
        assert_eq!(figures(&finished).len(), 2, "{}", finished.report("no estimate"));
        let longest = finished.lines_with("ggml-moe: ").iter().map(String::len).max();
        assert!(longest.is_none_or(|length| length < 2000), "a line of {longest:?} bytes for the keys {keys:.40}");
    }
}

#[test]
fn a_server_answers_through_a_missing_inner_device() {
    let side = Side::Plugin { keys: "inner=NoSuchDevice", device: "MoE0" };
    let ask = |side| Server::start(side, &fixture_model(), &["-c", "512", "-np", "1"]).complete("The list", 8, 0);
    assert_eq!(ask(side), ask(Side::Stock));
}

/// Cuts the fixture at several places: in the magic, the keys, the tensor list, the padding, and in each part of the data.
#[test]
fn truncated_models_are_refused() {
    let bytes = fs::read(fixture_model()).expect("the fixture can be read");
    let header = Header::read(&fixture_model());
    let data = usize::try_from(header.data_start).expect("a header fits memory");
    let experts = header.tensors.iter().find(|tensor| tensor.name.ends_with("_exps.weight")).expect("a MoE model");
    let inside = data + usize::try_from(experts.offset).expect("the fixture fits memory") + 1000;
    let folder = tempfile::tempdir().expect("a folder");
    for length in [0, 3, 20, data / 2, data - 1, data, inside, bytes.len() - 1] {
        let path = folder.path().join("cut.gguf");
        fs::write(&path, &bytes[..length]).expect("a cut copy");
        for mode in ["none", "mmap"] {
            let mut host = tool("llama-perplexity", OVER_CPU, &path, 2);
            let finished = run(host.args(["-f", text(&fixture("eval.txt")), "-lm", mode]), LIMIT).clean_failure();
            assert!(finished.log().contains("failed to load model"), "{}", finished.report("another error"));
        }
    }
}

/// Every N-th allocation of a kind fails, for one N after another; the first `certain` of them must stop the host.
fn failing_allocations(kind: &str, inner: &str, device: &str, certain: u32) {
    for every in 1..=6 {
        let keys = format!("inner={inner};debug-fail-alloc={kind}:{every}");
        let mut host = tool("llama-perplexity", Side::Plugin { keys: &keys, device }, &fixture_model(), 2);
        host.args(["-f", text(&fixture("eval.txt")), "-c", "128", "--chunks", "1"]);
        let finished = run(&mut host, LIMIT).no_signal();
        if finished.status.success() {
            assert!(every > certain, "{}", finished.report("an allocation should have failed"));
            assert_eq!(figures(&finished).len(), 2, "{}", finished.report("success without a result"));
        } else {
            let advice = finished.lines_with("ggml-moe: ").iter().any(|line| line.contains("; use a smaller "));
            assert!(advice, "{}", finished.report("no word on what to do"));
        }
    }
}

/// The weights, the cache and the compute buffer of one model.
#[test]
fn failing_device_allocations_end_cleanly() {
    failing_allocations("device", "CPU", "MoE0", 3);
}

/// The experts of two devices.
#[test]
fn failing_host_allocations_end_cleanly() {
    failing_allocations("host", "CPU,CPU", "MoE0,MoE1", 1);
}

/// Runs a program without the right to write where the permissions forbid it, even as the superuser.
fn unprivileged(path: &Path, side: Side<'_>) -> std::process::Command {
    let mut wrapped = command("setpriv".as_ref(), side);
    wrapped.args(["--bounding-set", "-dac_override,-dac_read_search", "--"]).arg(path);
    wrapped
}

#[test]
fn a_read_only_model_folder_is_enough() {
    use std::os::unix::fs::PermissionsExt;
    let folder_of_model = tempfile::tempdir().expect("a folder");
    let model = folder_of_model.path().join("model.gguf");
    fs::copy(fixture_model(), &model).expect("a copy of the fixture");
    let permit = |mode| fs::set_permissions(folder_of_model.path(), fs::Permissions::from_mode(mode));
    permit(0o555).expect("the folder is ours");
    let mut write = unprivileged("/usr/bin/touch".as_ref(), Side::Stock);
    let written = run(write.arg(folder_of_model.path().join("new")), LIMIT);
    let mut host = unprivileged(&folder().join("llama-perplexity"), OVER_CPU);
    host.args(["-m", text(&model), "-nr", "-t", "2", "-ngl", "99", "--device", "MoE0", "-c", "128", "--chunks", "1"]);
    let finished = run(host.args(["-f", text(&fixture("eval.txt"))]).current_dir(folder_of_model.path()), LIMIT);
    permit(0o755).expect("the folder is ours");
    written.clean_failure();
    crate::summary::ran_in_blocks(&finished.success());
}
