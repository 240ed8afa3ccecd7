//! The doctor's checks of RAM, processors and folders.

use std::path::Path;

use ggml_moe::machine::system;
use ggml_moe::planner::Machine;

use super::Checks;
use crate::plan;

const GIB: u64 = 1 << 30;

pub(super) fn of_ram(checks: &mut Checks, root: &Path, machine: &Machine) {
    let words = format!("{} MiB, {} free", machine.ram >> 20, machine.available >> 20);
    let limited = |limit: u64| format!("{words}; the control group allows {} MiB", limit >> 20);
    match machine.limit {
        _ if machine.ram == 0 => {
            let help = "experts lie in RAM, and are pinned until the system refuses: is /proc mounted? pin-budget-mb sets a limit";
            checks.warn("ram", "the system does not tell how much there is", help);
        }
        Some(limit) if limit < machine.ram / 2 => checks.warn(
            "ram",
            limited(limit),
            "experts must fit it: raise the limit of the container, or take a smaller model",
        ),
        Some(limit) => checks.ok("ram", limited(limit)),
        None if machine.available < 4 * GIB => {
            checks.warn("ram", words, "experts lie in RAM: close other programs");
        }
        None => checks.ok("ram", words),
    }
    let pinned = (machine.usable() / 4 * 3) >> 20;
    let words = match machine.ram {
        0 => "no limit is known (pin-budget-mb)".to_owned(),
        _ => format!("up to {pinned} MiB (three quarters of the RAM; pin-budget-mb)"),
    };
    if system::text(root, "/proc/sys/kernel/osrelease").is_some_and(|name| name.to_lowercase().contains("microsoft")) {
        let help = "what is refused is copied when used, which is slower; a larger memory= in .wslconfig may raise it";
        checks.warn("pinning", format!("{words}; below WSL Windows allows less, how much is not known"), help);
    } else {
        let locked = match system::locked_limit(root) {
            None => "not told".to_owned(),
            Some(u64::MAX) => "unlimited".to_owned(),
            Some(bytes) => format!("{} KiB", bytes >> 10),
        };
        let bound = "binds -lm mlock, and not the CUDA driver";
        checks.ok("pinning", format!("{words}; the limit of locked memory (ulimit -l: {locked}) {bound}"));
    }
    let huge = system::text(root, "/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default();
    match huge.split(['[', ']']).nth(1) {
        Some("never") => checks.warn(
            "huge pages",
            "off: reading experts misses the processor's address caches more often",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled, as root",
        ),
        Some(mode) => checks.ok("huge pages", mode.to_owned()),
        None => checks.ok("huge pages", "the system does not tell"),
    }
}

pub(super) fn of_processors(checks: &mut Checks, root: &Path, machine: &Machine) {
    let info = system::text(root, "/proc/cpuinfo").unwrap_or_default();
    let flags = info.lines().find_map(|line| line.strip_prefix("flags")).unwrap_or_default();
    let words = format!("{} cores that this process may use", machine.cores);
    if !flags.is_empty() && !flags.split_whitespace().any(|flag| flag == "avx2") {
        checks.warn("processor", format!("{words}, without AVX2"), "experts that are not on a card will be slow");
    } else {
        checks.ok("processor", words);
    }
    if machine.nodes > 1 {
        checks.warn(
            "memory nodes",
            format!("{}: threads of one read the memory of another at a fraction of the rate", machine.nodes),
            "start the host with numactl --interleave=all, or on the card's node with --cpunodebind and --membind",
        );
    } else {
        checks.ok("memory nodes", "one");
    }
}

/// The folder in which the state file lies.
pub(super) fn of_folder(checks: &mut Checks) {
    let Some(folder) = plan::cache_folder() else {
        checks.warn("cache folder", "there is none: HOME is not set", "set HOME, LLAMA_CACHE or XDG_CACHE_HOME");
        return;
    };
    let probe = folder.join(format!(".moe-doctor.{}", std::process::id()));
    let written = std::fs::create_dir_all(&folder)
        .and_then(|()| std::fs::write(&probe, ""))
        .and_then(|()| std::fs::remove_file(&probe));
    match written {
        Ok(()) => checks.ok("cache folder", folder.display().to_string()),
        Err(error) => checks.warn(
            "cache folder",
            format!("{}: {error}: what a model uses most is not remembered", folder.display()),
            "make it writable, or name another with LLAMA_CACHE or the key state-file",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Check, State};
    use super::*;

    /// The checks on a machine that has these files.
    fn of(files: &[(&str, &str)]) -> Vec<Check> {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        let mut checks = Checks::default();
        let machine = system::read(root.path());
        of_ram(&mut checks, root.path(), &machine);
        of_processors(&mut checks, root.path(), &machine);
        checks.0
    }

    fn find<'a>(checks: &'a [Check], what: &str) -> &'a Check {
        checks.iter().find(|check| check.what == what).unwrap()
    }

    const MEMORY: (&str, &str) = ("proc/meminfo", "MemTotal: 16777216 kB\nMemAvailable: 12582912 kB\n");

    #[test]
    fn a_system_that_tells_nothing_is_said_so() {
        let checks = of(&[]);
        assert_eq!(find(&checks, "ram").state, State::Warn);
        assert_eq!(find(&checks, "ram").words, "the system does not tell how much there is");
        assert!(find(&checks, "pinning").words.contains("ulimit -l: not told"));
        assert_eq!(find(&checks, "huge pages").words, "the system does not tell");
        assert!(find(&checks, "processor").state == State::Ok && find(&checks, "memory nodes").state == State::Ok);
    }

    #[test]
    fn limits_and_settings_are_told() {
        let limits = |value: &str| format!("Max locked memory         {value}   {value}   bytes\n");
        let checks = of(&[
            MEMORY,
            ("proc/self/limits", &limits("unlimited")),
            ("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n"),
            ("sys/devices/system/node/node0/cpulist", "0\n"),
            ("sys/devices/system/node/node1/cpulist", "1\n"),
            ("proc/cpuinfo", "processor : 0\nflags : fpu sse2\n"),
        ]);
        assert_eq!(find(&checks, "ram").words, "16384 MiB, 12288 free");
        assert!(
            find(&checks, "pinning").words.starts_with("up to 12288 MiB")
                && find(&checks, "pinning").words.contains("unlimited")
        );
        for what in ["huge pages", "memory nodes", "processor"] {
            assert!(find(&checks, what).state == State::Warn && find(&checks, what).help.is_some(), "{what}");
        }
        let checks = of(&[
            MEMORY,
            ("proc/self/limits", &limits("8388608")),
            ("proc/self/cgroup", "0::/box\n"),
            ("sys/fs/cgroup/box/memory.max", "4294967296\n"),
        ]);
        assert!(find(&checks, "ram").words.ends_with("the control group allows 4096 MiB"));
        assert!(
            find(&checks, "ram").state == State::Warn && find(&checks, "pinning").words.contains("ulimit -l: 8192 KiB")
        );
        let windows = of(&[MEMORY, ("proc/sys/kernel/osrelease", "5.15.167.4-microsoft-standard-WSL2\n")]);
        assert!(
            find(&windows, "pinning").state == State::Warn && find(&windows, "pinning").words.contains("below WSL")
        );
    }
}
