//! Where the sockets lie, and who made them.
//!
//! Owns: the private folders, the names in them, and what is left over from processes that are gone.
//! Invariants: a folder is used only if nobody but its owner, who is us, gets at it; nothing is removed that somebody may still serve.
//! Threads: any. Does not: serve.

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use super::system;

const ENDING: &str = "sock";

/// The folders in which sockets may lie, the best first: the user's runtime folder, or one for the user in `/tmp`.
pub(super) fn folders() -> Vec<PathBuf> {
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|path| path.is_absolute());
    let shared = PathBuf::from(format!("/tmp/ggml-moe-{}", system::own_uid()));
    runtime.map(|path| path.join("ggml-moe")).into_iter().chain([shared]).collect()
}

/// Makes a folder private, or says why it is not.
pub(super) fn make_private(folder: &Path) -> io::Result<()> {
    match fs::DirBuilder::new().mode(0o700).create(folder) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    // Of the name itself: a link of somebody else must lead nowhere.
    let found = fs::symlink_metadata(folder)?;
    if !found.is_dir() || found.uid() != system::own_uid() || found.mode() & 0o077 != 0 {
        return Err(io::Error::other("it is no folder that only its owner, this user, can open"));
    }
    Ok(())
}

/// The name of a process's socket.
pub(super) fn name(folder: &Path, pid: u32) -> PathBuf {
    folder.join(format!("{pid}.{ENDING}"))
}

fn pid_of(path: &Path) -> Option<u32> {
    path.file_name()?.to_str()?.strip_suffix(ENDING)?.strip_suffix('.')?.parse().ok()
}

/// The sockets in a folder, by number of process.
pub(super) fn sockets(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut found: Vec<(u32, PathBuf)> =
        entries.map(|entry| entry.path()).filter_map(|path| pid_of(&path).map(|pid| (pid, path))).collect();
    found.sort();
    found.into_iter().map(|(_, path)| path).collect()
}

/// Whether nobody serves a socket any more. Connecting tells, whatever namespace a process lives in; one that has made its socket and does
/// not serve it yet looks the same.
fn is_refused(path: &Path) -> bool {
    UnixStream::connect(path).is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
}

/// Removes the sockets of processes that are gone.
pub(super) fn clean(folder: &Path) {
    for path in sockets(folder) {
        let gone = pid_of(&path).is_some_and(|pid| !system::is_alive(pid));
        if gone && is_refused(&path) {
            // Somebody else may have been faster.
            let _ = fs::remove_file(&path);
        }
    }
}

/// Makes a socket of this name that only its owner can connect to. What is left over there of a process that is gone is replaced.
pub(super) fn bind(path: &Path) -> io::Result<UnixListener> {
    let listener = match UnixListener::bind(path) {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
            let ours = fs::symlink_metadata(path)
                .is_ok_and(|found| found.file_type().is_socket() && found.uid() == system::own_uid());
            if !(ours && is_refused(path)) {
                return Err(io::Error::new(error.kind(), "the name is taken"));
            }
            fs::remove_file(path)?;
            UnixListener::bind(path)?
        }
        made => made?,
    };
    // Who connected before this is refused by his number.
    fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_that_others_can_open_is_refused() {
        let place = tempfile::tempdir().unwrap();
        let folder = place.path().join("a");
        make_private(&folder).unwrap();
        make_private(&folder).unwrap();
        assert_eq!(fs::metadata(&folder).unwrap().mode() & 0o777, 0o700);
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o750)).unwrap();
        assert!(make_private(&folder).is_err());
        let link = place.path().join("b");
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o700)).unwrap();
        std::os::unix::fs::symlink(&folder, &link).unwrap();
        assert!(make_private(&link).is_err());
        assert!(make_private(&place.path().join("c/d")).is_err());
        if system::own_uid() == 0 {
            std::os::unix::fs::chown(&folder, Some(12_345), None).unwrap();
            assert!(make_private(&folder).is_err(), "of somebody else");
        }
    }

    #[test]
    fn only_what_nobody_serves_is_removed() {
        let place = tempfile::tempdir().unwrap();
        let dead = 4_194_304 + 7; // above the largest number that Linux gives
        let (left, served, odd) =
            (name(place.path(), dead), name(place.path(), dead + 1), place.path().join("notes.sock"));
        drop(UnixListener::bind(&left).unwrap());
        let _serving = UnixListener::bind(&served).unwrap();
        drop(UnixListener::bind(&odd).unwrap());
        let own = name(place.path(), std::process::id());
        drop(UnixListener::bind(&own).unwrap());
        assert_eq!(sockets(place.path()), [own.clone(), left.clone(), served.clone()]);
        clean(place.path());
        assert!(!left.exists() && served.exists() && odd.exists() && own.exists());
        // Its own name is free for a process, whatever lies there of one before it.
        bind(&own).unwrap();
        assert_eq!(fs::metadata(&own).unwrap().mode() & 0o777, 0o600);
        assert_eq!(bind(&served).unwrap_err().to_string(), "the name is taken");
        fs::write(place.path().join("file"), "").unwrap();
        assert_eq!(bind(&place.path().join("file")).unwrap_err().to_string(), "the name is taken");
        assert!(bind(&place.path().join("x".repeat(120))).is_err());
    }
}
