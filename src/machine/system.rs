//! RAM, processors and limits, as files of the system tell them.
//!
//! Owns: their reading. Invariants: any text is accepted; what is not understood is unknown. Threads: any; nothing is kept.
//! Does not: change anything.

use std::collections::BTreeSet;
use std::path::Path;

use crate::planner::machine::Machine;
use crate::ram;

/// The text of a file below `root`.
pub fn text(root: &Path, path: &str) -> Option<String> {
    std::fs::read_to_string(root.join(path.trim_start_matches('/'))).ok()
}

/// A line of /proc/meminfo, in bytes.
pub fn meminfo(text: &str, name: &str) -> Option<u64> {
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    value.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// The least limit of the control groups, in bytes; a limit that is larger than the RAM is none.
pub fn limit(root: &Path) -> Option<u64> {
    let groups = text(root, "/proc/self/cgroup").unwrap_or_default();
    let files = ram::limit_files(&groups);
    let limit = files.iter().filter_map(|path| text(root, path)?.trim().parse::<u64>().ok()).min()?;
    let machine = text(root, "/proc/meminfo").and_then(|text| meminfo(&text, "MemTotal"));
    machine.is_none_or(|machine| limit < machine).then_some(limit)
}

/// Numbers in a list like `0-3,8`.
pub fn numbers(list: &str) -> Vec<u32> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (u32, u32) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        (last >= first && last - first < 1 << 16).then_some(first..=last)
    };
    list.trim().split(',').filter_map(range).flatten().collect()
}

/// Physical cores among the processors that this process may use.
fn cores(root: &Path) -> u64 {
    let usable = std::thread::available_parallelism().map_or(1, core::num::NonZero::get) as u64;
    let status = text(root, "/proc/self/status").unwrap_or_default();
    let allowed =
        status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).map(numbers).unwrap_or_default();
    let sibling = |processor: &u32| {
        let path = format!("/sys/devices/system/cpu/cpu{processor}/topology/thread_siblings_list");
        text(root, &path).map(|list| list.trim().to_owned())
    };
    let pairs: Option<BTreeSet<String>> = allowed.iter().map(sibling).collect();
    let cores = pairs.map_or(0, |pairs| pairs.len() as u64);
    if cores == 0 { usable } else { cores.min(usable) }
}

/// Nodes of memory.
fn nodes(root: &Path) -> u64 {
    let entries = std::fs::read_dir(root.join("sys/devices/system/node")).into_iter().flatten().flatten();
    let is_node = |name: &str| name.strip_prefix("node").is_some_and(|rest| rest.parse::<u32>().is_ok());
    entries.filter(|entry| entry.file_name().to_str().is_some_and(is_node)).count().max(1) as u64
}

/// The machine without cards and rates.
pub fn read(root: &Path) -> Machine {
    let memory = text(root, "/proc/meminfo").unwrap_or_default();
    let ram = meminfo(&memory, "MemTotal").unwrap_or(0);
    Machine {
        ram,
        available: meminfo(&memory, "MemAvailable").unwrap_or(ram),
        limit: limit(root),
        cores: cores(root),
        nodes: nodes(root),
        ..Machine::default()
    }
}

/// The limit of locked memory of this process, in bytes; the largest number is no limit.
pub fn locked_limit(root: &Path) -> Option<u64> {
    let limits = text(root, "/proc/self/limits")?;
    let line = limits.lines().find_map(|line| line.strip_prefix("Max locked memory"))?;
    match line.split_whitespace().next()? {
        "unlimited" => Some(u64::MAX),
        bytes => bytes.parse().ok(),
    }
}

/// The release of NVIDIA's driver, as its kernel module tells it.
pub fn driver_release(root: &Path) -> Option<String> {
    let version = text(root, "/proc/driver/nvidia/version")?;
    let is_release = |word: &&str| word.contains('.') && word.split('.').all(|part| part.parse::<u32>().is_ok());
    version.lines().next()?.split_whitespace().find(is_release).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_numbers() {
        assert_eq!(numbers("0-2,7\n"), [0, 1, 2, 7]);
        assert_eq!(numbers("x,5-3,0-99999999"), Vec::<u32>::new());
        assert_eq!(meminfo("MemTotal: 2 kB\n", "MemTotal"), Some(2048));
        assert_eq!(meminfo("MemTotal: 2 pages\nHugePages_Total: 3", "MemTotal"), None);
    }

    #[test]
    fn the_driver_s_release_is_read() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(driver_release(root.path()), None);
        let folder = root.path().join("proc/driver/nvidia");
        std::fs::create_dir_all(&folder).unwrap();
        let line = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (dvs)\nGCC version:  gcc version 12.2.0\n";
        std::fs::write(folder.join("version"), line).unwrap();
        assert_eq!(driver_release(root.path()).as_deref(), Some("580.95.05"));
    }

    #[test]
    fn this_machine_has_something() {
        let machine = read(Path::new("/"));
        assert!(machine.ram > 0 && machine.available > 0 && machine.cores > 0 && machine.nodes > 0);
        assert_eq!(read(Path::new("/no/such/folder")).ram, 0);
    }
}
