//! What the preload prints on request: the page of `--moe help`, and the section behind the host's own help.
//!
//! Owns: both texts, made of the table of keys. Threads: none. Does not: print.

use crate::config::KEYS;

/// How wide the column of names is.
const COLUMN: usize = 30;
/// How wide a line may be.
const WIDTH: usize = 120;

/// The section behind the host's help.
pub(super) fn section() -> String {
    let mut text = String::from("\n\n----- ggml-moe (preloaded) -----\n\n");
    for (name, effect) in [
        (
            "--moe KEY=VALUE",
            "a setting of ggml-moe; may be given several times, the last one of a key holds (env: GGML_MOE, less than the argument)",
        ),
        ("--moe help", "list the settings and exit"),
        ("--moe off", "run as if ggml-moe were not there"),
        ("--moe-expert-cache N", "room for N experts of each layer in GPU memory; -1 is automatic, 0 is off"),
    ] {
        entry(&mut text, name, effect);
    }
    text
}

/// The page of `--moe help`.
pub(super) fn page() -> String {
    let mut text = format!(
        "ggml-moe {}: settings, each as --moe KEY=VALUE or in GGML_MOE=\"KEY=VALUE;KEY=VALUE\"\n\n",
        env!("CARGO_PKG_VERSION")
    );
    for key in KEYS.iter().filter(|key| !key.test_only) {
        let unit = if key.unit == "-" { String::new() } else { format!(" ({})", key.unit) };
        entry(
            &mut text,
            key.name,
            &format!("{} Accepted{unit}: {}. Default: {}.", key.effect, key.range.trim_end_matches('.'), key.default),
        );
    }
    text.push_str("\nThe settings that llama.cpp itself was given win: with -ngl, -ot, -cmoe, -ncmoe or --device it runs as without ggml-moe,\nunless a cache is asked for (--moe cache=auto).\n");
    text
}

/// A name and what it does, broken into lines.
fn entry(text: &mut String, name: &str, effect: &str) {
    let mut line = format!("{name:<COLUMN$}");
    if name.len() >= COLUMN {
        text.push_str(&line);
        text.push('\n');
        line = " ".repeat(COLUMN);
    }
    for word in effect.split_whitespace() {
        if line.len() + word.len() > WIDTH && line.trim().len() > name.len() {
            text.push_str(line.trim_end());
            text.push('\n');
            line = " ".repeat(COLUMN);
        }
        line.push_str(word);
        line.push(' ');
    }
    text.push_str(line.trim_end());
    text.push('\n');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_list_what_users_need_and_stay_narrow() {
        let page = page();
        for key in KEYS {
            let listed = page.lines().any(|line| line.split(' ').next() == Some(key.name));
            assert_eq!(listed, !key.test_only, "{}", key.name);
        }
        assert!(section().contains("--moe off"));
        for line in page.lines().chain(section().lines()) {
            assert!(line.chars().count() <= WIDTH + 20, "{line}");
        }
    }
}
