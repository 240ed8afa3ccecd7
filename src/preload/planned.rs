//! What the planner says of a model that is about to be loaded.
//!
//! Owns: the way from what this process and its devices are to the planner's input: flags by the kind of program, cards, RAM, rates that were
//! measured before. Invariants: nothing is measured and no device is asked for more than its memory. Threads: the one that loads.
//! Does not: decide (`planner::advice` does).

use std::path::Path;

use crate::config::Config;
use crate::device::Device;
use crate::experts::{statefile::State, statefolder, statestore};
use crate::explicit::Explicit;
use crate::machine::{self, rates};
use crate::model::gguf::Header;
use crate::planner::machine::{LINK_GBS, Source};
use crate::planner::usage::Draft;
use crate::planner::{Advice, Card, MIB, Model, advise, flags, flags::Flags, learned};

/// The flags as the program means them. The first word is its name.
pub(super) fn flags_of(words: &[String], variable: impl Fn(&str) -> Option<String>) -> Flags {
    let name = words.first().and_then(|word| Path::new(word).file_name()?.to_str()).unwrap_or_default().to_owned();
    let rest = words.get(1..).unwrap_or_default();
    let mut flags = flags::read(rest, name.contains("server"), variable);
    let usage = &mut flags.usage;
    if name.contains("bench") {
        // A bench fits nothing unless it is asked to, and has a context for each test.
        usage.fit = rest.iter().any(|word| word == "-fitt" || word == "--fit-target");
        usage.context = Some(bench_context(rest));
    } else if name.contains("perplexity") || name.contains("imatrix") {
        // Chunks of this length, as many together as a batch holds.
        usage.context = Some(usage.context.unwrap_or(512).max(2048));
    }
    flags
}

/// The longest of a bench's tests.
fn bench_context(words: &[String]) -> u64 {
    let most = |names: [&str; 2], default: u64| {
        let value = words.iter().rposition(|word| names.contains(&word.as_str())).and_then(|at| words.get(at + 1));
        let numbers = value.map(|value| value.split(',').filter_map(|number| number.parse::<u64>().ok()).max());
        numbers.flatten().unwrap_or(default)
    };
    let pair = words.iter().rposition(|word| word == "-pg").and_then(|at| words.get(at + 1));
    let pair = pair.map_or(0, |value| value.split(',').filter_map(|number| number.parse::<u64>().ok()).sum());
    let tests = most(["-p", "--n-prompt"], 512).max(most(["-n", "--n-gen"], 128)).max(pair);
    tests.saturating_add(most(["-d", "--n-depth"], 0)).max(1)
}

/// The advice for the model of these headers; `None` if there is none.
pub(super) fn advice(
    headers: &[Header],
    flags: &Flags,
    explicit: &Explicit,
    config: &Config,
    devices: &[&'static Device],
) -> Option<Advice> {
    let model = Model::of(headers).ok()?;
    let mut usage = flags.usage.clone();
    if usage.batch.is_none() {
        usage.batch = if explicit.batch.is_some() { Some(512) } else { config.pass_tokens.map(u64::from) };
    }
    // What the host fetches is there before it loads anything.
    if let Some(draft) = flags.draft_file(&|name| std::env::var_os(name)) {
        usage.draft = Model::open(&draft).ok().map(|model| Draft { model });
    }
    let state = statefolder::path(config.experts.state_file.as_ref(), |name| std::env::var_os(name));
    if let Some(text) = state.as_deref().and_then(|path| statestore::text(path).ok()) {
        usage.learned = State::parse(&text).map(|state| learned::curve(&state, &model.shape)).unwrap_or_default();
    }
    let kept = state.as_deref().and_then(Path::parent).map(|folder| rates::Rates::read(&folder.join(rates::FILE_NAME)));
    let card = |device: &&'static Device| {
        let (free, total) = device.free_and_total();
        Card {
            name: device.inner_name.clone(),
            description: device.inner_description(),
            total: total as u64,
            free: free as u64,
            link_gbs: LINK_GBS,
            ..Card::default()
        }
    };
    let cards = devices.iter().map(card).collect();
    let mut machine = machine::look(Path::new("/"), cards, &kept.unwrap_or_default());
    if let Some(rate) = config.experts.link_gbs {
        for card in &mut machine.cards {
            (card.link_gbs, card.link) = (f64::from(rate), Source::Measured);
        }
    }
    if let Some(mib) = config.debug_ram_mb {
        machine.available = mib.saturating_mul(MIB);
    }
    usage.lends &= devices.iter().all(|device| device.lends());
    advise(&model, &machine, &usage)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(line: &str) -> Flags {
        let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
        flags_of(&words, |_| None)
    }

    #[test]
    fn programs_have_contexts_of_their_own() {
        let context = |line: &str| of(line).usage.context;
        assert_eq!(context("/x/llama-server -m y"), None);
        assert_eq!((of("llama-server -m y").usage.parallel, of("llama-cli -m y").usage.parallel), (4, 1));
        assert_eq!(context("llama-bench -m y"), Some(512));
        assert_eq!(context("llama-bench -p 512,4096 -n 9 -d 100,200"), Some(4296));
        assert_eq!(context("llama-bench -p 0 -n 0 -pg 3000,500"), Some(3500));
        assert_eq!((of("llama-bench").usage.fit, of("llama-bench -fitt 9").usage.fit), (false, true));
        assert_eq!(context("llama-perplexity -c 4096"), Some(4096));
        assert_eq!(context("llama-perplexity"), Some(2048));
        assert!(of("llama-server").usage.fit);
    }
}
