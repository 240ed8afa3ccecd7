//! What the planner says of a model that is about to be loaded.
//!
//! Owns: the way from what this process and its devices are to the planner's input: cards, RAM, rates that were
//! measured before. Invariants: nothing is measured and no device is asked for more than its memory. Threads: the one that loads.
//! Does not: decide (`planner::advice` does).

use std::path::Path;

use crate::abi::llama::shares_masks;
use crate::config::Config;
use crate::device::Device;
use crate::experts::{statefile::State, statefolder, statestore};
use crate::explicit::{Call, standing};
use crate::machine::{self, rates};
use crate::model::gguf::Header;
use crate::planner::machine::LINK_GBS;
use crate::planner::usage::Draft;
use crate::planner::{Advice, Card, Model, advise, flags::Flags, learned};

/// The advice for the model of these headers; `None` if there is none.
pub(super) fn advice(
    headers: &[Header],
    flags: &Flags,
    call: Call,
    config: &Config,
    devices: &[&'static Device],
) -> Option<Advice> {
    let model = Model::of(headers).ok()?;
    let mut usage = flags.usage.clone();
    // Parameters of the call may say what no flag did.
    usage.standing = standing(&flags.explicit, usage.cache_asked, call);
    if !shares_masks() {
        usage.ways.mask_threads = None;
    }
    // What the host fetches is there before it loads anything.
    if let Some(draft) = flags.draft_file(&|name| std::env::var_os(name)) {
        usage.draft = Model::open(&draft).ok().map(|model| Draft { model });
    }
    let state = statefolder::path(config.experts.state_file.as_ref(), |name| std::env::var_os(name));
    let remembered = state.as_deref().filter(|_| config.experts.remembers());
    if let Some(text) = remembered.and_then(|path| statestore::text(path).ok()) {
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
    machine::as_settings_say(&mut machine, config);
    advise(&model, &machine, &usage)
}
