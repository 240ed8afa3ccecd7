//! The RAM that this process may use, as the system tells it.
//!
//! Owns: the reading of /proc/meminfo, of what is locked, and of the limits of control groups.
//! Invariants: any text is accepted; what is not understood limits nothing. No file outside the folders of control groups is named.
//! Threads: any; nothing is kept.
//! Does not: know who uses it.

/// The RAM that this process may use, in bytes: the machine's, or less where a control group limits it. If the system does not tell, no
/// limit is known and pinning goes on until the system refuses.
pub(crate) fn usable_bytes() -> usize {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let files = limit_files(&read("/proc/self/cgroup"));
    let limit = files.iter().filter_map(|path| read(path).trim().parse::<usize>().ok()).min();
    let machine = machine_bytes(&read("/proc/meminfo"));
    if machine == 0 { usize::MAX } else { machine }.min(limit.unwrap_or(usize::MAX))
}

/// RAM that is free or becomes free when it is needed, in bytes, as far as the system tells.
pub(crate) fn available_bytes() -> usize {
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    field_bytes(&meminfo, "MemAvailable:").unwrap_or(usize::MAX).min(usable_bytes())
}

/// Bytes that this process has locked in RAM.
pub(crate) fn locked_bytes() -> usize {
    field_bytes(&std::fs::read_to_string("/proc/self/status").unwrap_or_default(), "VmLck:").unwrap_or(0)
}

/// Where the memory limits of a process stand: of its control group and of every group above, in both versions of control groups. `cgroup`
/// is the text of /proc/self/cgroup.
pub fn limit_files(cgroup: &str) -> Vec<String> {
    let mut files = Vec::new();
    for line in cgroup.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (root, file) = match parts.next() {
            Some("") => ("/sys/fs/cgroup", "memory.max"),
            Some(controllers) if controllers.split(',').any(|name| name == "memory") => {
                ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")
            }
            _ => continue,
        };
        // A group outside of what this process sees begins with "/..": what limits it from there, only the root tells.
        let is_path = |group: &&str| group.starts_with('/') && !group.split('/').any(|part| part == "..");
        let group = parts.next().filter(is_path).unwrap_or("").trim_end_matches('/');
        files.extend(std::path::Path::new(group).ancestors().map(|group| {
            let group = group.to_string_lossy();
            format!("{root}{}/{file}", group.trim_end_matches('/'))
        }));
    }
    files
}

/// `MemTotal` of /proc/meminfo, in bytes.
pub fn machine_bytes(meminfo: &str) -> usize {
    field_bytes(meminfo, "MemTotal:").unwrap_or(0)
}

/// A line "name   number kB", in bytes.
fn field_bytes(text: &str, name: &str) -> Option<usize> {
    let number = |line: &str| line.strip_prefix(name)?.trim().strip_suffix("kB")?.trim().parse::<usize>().ok();
    Some(text.lines().find_map(number)?.saturating_mul(1024))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_the_machine() {
        assert_eq!(machine_bytes("MemFree: 1 kB\nMemTotal:       24684036 kB\n"), 24_684_036 * 1024);
        assert_eq!(machine_bytes(""), 0);
        assert!(usable_bytes() > 0);
        assert!(available_bytes() > 0 && available_bytes() < usize::MAX);
        assert_eq!(field_bytes("VmPin:\t 1 kB\nVmLck:\t      12 kB\n", "VmLck:"), Some(12 * 1024));
        assert_eq!(field_bytes("VmLck: 12 MB\n", "VmLck:"), None);
    }

    #[test]
    fn limits_stand_in_every_group_above() {
        let files = limit_files("12:cpu,cpuacct:/x\n7:memory:/a/b\n0::/user.slice/s\n");
        assert_eq!(
            files,
            [
                "/sys/fs/cgroup/memory/a/b/memory.limit_in_bytes",
                "/sys/fs/cgroup/memory/a/memory.limit_in_bytes",
                "/sys/fs/cgroup/memory/memory.limit_in_bytes",
                "/sys/fs/cgroup/user.slice/s/memory.max",
                "/sys/fs/cgroup/user.slice/memory.max",
                "/sys/fs/cgroup/memory.max",
            ]
        );
        assert_eq!(limit_files("0::/\n").last().unwrap(), "/sys/fs/cgroup/memory.max");
        assert_eq!(limit_files("0::/../../x\n"), ["/sys/fs/cgroup/memory.max"]);
        assert!(limit_files("nonsense").is_empty());
    }
}
