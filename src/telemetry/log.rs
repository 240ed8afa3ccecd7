//! The log: one sink, one filter, one prefix.
//!
//! The sink is the host's own log once the ABI layer has found it, and standard error before that. llama.cpp's tools hide
//! information lines by default, so a line that the user's `log` key asks for is sent at the warning level.

use std::io::Write as _;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, Ordering};

use crate::config::{LogDetail, turns_line};

/// The levels that the host's log knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HostLevel {
    Debug,
    Info,
    Warn,
    Error,
}

/// Where lines go: receives the level and the whole line, newline included.
pub(crate) type Sink = fn(HostLevel, &str);

static SINK: OnceLock<Sink> = OnceLock::new();
static DETAIL: AtomicU8 = AtomicU8::new(LogDetail::Notice as u8);

/// Sends every later line to the host's log. The first sink stays.
pub(crate) fn set_sink(sink: Sink) {
    // A second load of the plugin finds the same host, so the first sink is as good.
    let _ = SINK.set(sink);
}

/// Lines up to this detail are made visible.
pub(crate) fn set_detail(detail: LogDetail) {
    DETAIL.store(detail as u8, Ordering::Relaxed);
}

/// Whether lines of this detail are made visible; guards work that only feeds the log.
pub(crate) fn shows(detail: LogDetail) -> bool {
    detail as u8 <= DETAIL.load(Ordering::Relaxed)
}

/// A decision that the user is told whatever the host does with its log: some programs show errors only, some nothing.
pub(crate) fn tell(text: &str) {
    if shows(LogDetail::Notice) {
        // A closed stream is no failure of ours.
        let _ = std::io::stderr().write_all(line(text).as_bytes());
    }
}

/// Something went wrong. End with what the user can do.
pub(crate) fn error(text: &str) {
    send(HostLevel::Error, text);
}

/// A decision and its reason.
pub(crate) fn notice(text: &str) {
    at(LogDetail::Notice, text);
}

/// What a load or a context did.
pub(crate) fn info(text: &str) {
    at(LogDetail::Info, text);
}

/// Detail for the project's own tests and for reports of faults.
pub(crate) fn debug(text: &str) {
    at(LogDetail::Debug, text);
}

fn at(detail: LogDetail, text: &str) {
    let own = match detail {
        LogDetail::Debug => HostLevel::Debug,
        _ => HostLevel::Info,
    };
    send(if shows(detail) { HostLevel::Warn } else { own }, text);
}

/// One event is one line, whatever a name in it holds.
fn line(text: &str) -> String {
    let shown: String = text.chars().map(|c| if turns_line(c) { '?' } else { c }).collect();
    format!("ggml-moe: {shown}\n")
}

fn send(level: HostLevel, text: &str) {
    let line = line(text);
    match SINK.get() {
        Some(sink) => sink(level, &line),
        None if level == HostLevel::Warn || level == HostLevel::Error => {
            // A closed stream is no failure of ours.
            let _ = std::io::stderr().write_all(line.as_bytes());
        }
        None => {}
    }
}

#[cfg(test)]
mod tests {
    use super::line;

    #[test]
    fn a_name_cannot_break_the_line() {
        assert_eq!(
            line("\"a\nggml-moe: b\u{1b}[2J\u{202e}\" is not there"),
            "ggml-moe: \"a?ggml-moe: b?[2J?\" is not there\n"
        );
    }
}
