//! Whether the experts of a buffer are copied to RAM or stay in the model's file, if the loader maps it.
//!
//! Owns: the decision for one buffer, made once, and the line that tells why experts are copied all the same.
//! Invariants: what the user asked to be locked in RAM is copied; `experts-from` holds otherwise; without it experts stay in the file unless the device
//! reads RAM faster than a file and they fit.
//! Threads: the loader's. Does not: map (`mapped` does).

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use super::HostMemory;
use super::mapped::Unmapped;
use crate::config::ExpertsFrom;
use crate::device::Device;
use crate::ram;
use crate::telemetry::log;

/// Where the experts of one buffer come from.
#[derive(Debug, Default)]
pub(crate) struct Origin {
    decision: OnceLock<Result<(), &'static str>>,
    told: AtomicBool,
    /// Whether a view was made of a tensor that may still move.
    viewed: AtomicBool,
}

impl Origin {
    /// A view was placed in the buffer: it has the address of its tensor, which therefore stays where it is.
    pub(crate) fn note_view(&self) {
        self.viewed.store(true, Ordering::Relaxed);
    }

    /// Whether tensors of this memory may show the file.
    pub(crate) fn wants_file(&self, device: &Device, memory: &HostMemory) -> Result<(), Unmapped> {
        if self.viewed.load(Ordering::Relaxed) {
            return Err(Unmapped::Unwanted("a view of one was made before it was loaded"));
        }
        let decided = self.decision.get_or_init(|| {
            let facts = Facts {
                setting: device.expert_settings().from,
                locked: ram::locked_bytes() >= memory.bytes(),
                pins: device.driver().pins() && device.pin_limit_bytes() > 0,
                fits: ram::available_bytes() > memory.bytes(),
            };
            decide(&facts)
        });
        decided.map_err(Unmapped::Unwanted)
    }

    /// Tells once why a tensor was copied that the loader had mapped.
    pub(crate) fn tell_copied(&self, device: &Device, why: &Unmapped) {
        if !matches!(why, Unmapped::NotAFile) && !self.told.swap(true, Ordering::Relaxed) {
            log::info(&format!("{}: experts are copied from the mapped file to RAM: {why}", device.label()));
        }
    }
}

struct Facts {
    setting: ExpertsFrom,
    /// Whether as much memory as the buffer has is locked.
    locked: bool,
    /// Whether the device reads RAM in place once it is pinned.
    pins: bool,
    /// Whether a copy fits the RAM that is free.
    fits: bool,
}

fn decide(facts: &Facts) -> Result<(), &'static str> {
    match facts.setting {
        ExpertsFrom::Ram => Err("experts-from=ram"),
        _ if facts.locked => Err("they are to be locked in RAM"),
        ExpertsFrom::File => Ok(()),
        ExpertsFrom::Auto if facts.pins && facts.fits => {
            Err("they fit, and pinned RAM is faster (experts-from=file leaves them there)")
        }
        ExpertsFrom::Auto => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_holds_before_what() {
        let at = |setting, locked, pins, fits| decide(&Facts { setting, locked, pins, fits }).is_ok();
        use ExpertsFrom::{Auto, File, Ram};
        assert!(!at(Ram, false, false, false));
        assert!(at(File, false, true, true));
        assert!(!at(File, true, true, true), "locked");
        assert!(!at(Auto, true, false, false), "locked");
        assert!(at(Auto, false, false, true), "nothing is gained by RAM");
        assert!(at(Auto, false, true, false), "it does not fit");
        assert!(!at(Auto, false, true, true));
    }
}
