//! The state file on disk.
//!
//! Owns: reading, setting a broken file aside, and writing: under a lock beside the file, what others wrote meanwhile is merged in,
//! and the new text takes the place of the old one in one step.
//! Invariants: whoever reads sees an old or a new file, never a part of one. No failure here is fatal: it ends in a [`Note`] or an
//! error that the caller tells once. A file of a later format is neither moved nor overwritten.
//! Threads: any; processes are kept apart by the lock. Does not: decide where the file is or when it is written.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::statefile::{MOST_BYTES, State, StateError};
use super::statefolder::FILE_NAME;

/// How long the lock of another process is waited for.
const LONGEST_LOCK: Duration = Duration::from_secs(2);

/// What happened while reading.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Note {
    /// The file was broken and is now called that.
    SetAside {
        /// What was wrong with it.
        error: String,
        /// Its new name.
        to: PathBuf,
    },
    /// The file cannot be used and was left alone.
    Ignored {
        /// Why.
        error: String,
    },
}

/// Reads the file. A missing one is an empty state. What is no state file is left alone.
pub fn read(path: &Path) -> (State, Option<Note>) {
    let path = &target(path);
    let bytes = match bytes(path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return (State::default(), None),
        Err(error) => return (State::default(), Some(Note::Ignored { error: error.to_string() })),
    };
    let broken = |error: String| {
        let note = if is_ours(path, &bytes) {
            set_aside(path, error)
        } else {
            Note::Ignored { error: format!("it is no state file ({error})") }
        };
        (State::default(), Some(note))
    };
    let text = match std::str::from_utf8(&bytes) {
        Ok(text) => text,
        Err(error) => return broken(error.to_string()),
    };
    match State::parse(text) {
        Ok(_) if !bytes.is_empty() && !is_ours(path, &bytes) => broken("it has no line \"format = 1\"".to_owned()),
        Ok(state) => (state, None),
        Err(error @ StateError::Newer { .. }) => (State::default(), Some(Note::Ignored { error: error.to_string() })),
        Err(error) => broken(error.to_string()),
    }
}

/// Merges what this process learned since it read the file into the file.
pub fn add(path: &Path, learned: &State) -> io::Result<Option<Note>> {
    edit(path, |state| state.merge(learned))
}

/// Changes the file under its lock. A missing one begins empty, a broken one is set aside first.
pub fn edit(path: &Path, change: impl FnOnce(&mut State)) -> io::Result<Option<Note>> {
    let path = &target(path);
    if path.file_name().is_none() || path.is_dir() {
        return Err(io::Error::other("it is a folder"));
    }
    if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
        std::fs::create_dir_all(folder)?;
    }
    // Nothing is put beside a file that is none of ours.
    match bytes(path) {
        Ok(bytes) if !bytes.is_empty() && !is_ours(path, &bytes) => {
            return Err(io::Error::other("it is no state file"));
        }
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        Ok(_) | Err(_) => {}
    }
    let _lock = lock(&beside(path, "lock"))?;
    let (mut state, note) = read(path);
    if let Some(Note::Ignored { error }) = note {
        return Err(io::Error::other(error));
    }
    change(&mut state);
    replace(path, &state.format())?;
    Ok(note)
}

/// What a path leads to: a link stays, and what it points to is replaced.
fn target(path: &Path) -> PathBuf {
    path.canonicalize().unwrap_or_else(|_| path.to_path_buf())
}

/// Opens a file, and nothing else: to open a pipe or a device may wait, or do something.
fn open_file(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
    let file = options.custom_flags(libc::O_NONBLOCK).open(path)?;
    if file.metadata()?.is_file() { Ok(file) } else { Err(io::Error::other("it is no regular file")) }
}

/// Takes the lock, for as long as the result lives. Who holds it for seconds is stuck.
fn lock(path: &Path) -> io::Result<File> {
    let file = open_file(OpenOptions::new().create(true).truncate(false).write(true), path)?;
    let start = Instant::now();
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::Error(error)) => return Err(error),
            Err(TryLockError::WouldBlock) if start.elapsed() > LONGEST_LOCK => {
                return Err(io::Error::other(format!("another process holds {}", path.display())));
            }
            Err(TryLockError::WouldBlock) => std::thread::sleep(Duration::from_millis(10)),
        }
    }
}

/// Whether a file is a state file, whole or broken: by its usual name, or by what stands in it.
fn is_ours(path: &Path, bytes: &[u8]) -> bool {
    let named = path.file_name().is_some_and(|name| name == FILE_NAME);
    let mut lines = bytes.split(|byte| *byte == b'\n').take(64);
    named
        || lines.any(|line| {
            line.trim_ascii().strip_prefix(b"format").is_some_and(|rest| rest.trim_ascii_start().starts_with(b"="))
        })
}

/// Writes a file in one step: a new file beside it, on the disk, then renamed.
pub fn replace(path: &Path, text: &str) -> io::Result<()> {
    let fresh = beside(path, &format!("new.{}", std::process::id()));
    let written = File::create(&fresh).and_then(|mut file| {
        file.write_all(text.as_bytes())?;
        file.sync_all()
    });
    let replaced = written.and_then(|()| std::fs::rename(&fresh, path));
    if replaced.is_err() {
        // What is left over is worth nothing; the first error is the one to tell.
        let _ = std::fs::remove_file(&fresh);
    }
    replaced
}

/// The text of a file, as far as a state file may be long.
pub fn text(path: &Path) -> io::Result<String> {
    let bytes = bytes(path)?;
    String::from_utf8(bytes).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error.utf8_error().to_string()))
}

fn bytes(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open_file(OpenOptions::new().read(true), path)?.take(MOST_BYTES as u64 + 1).read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn set_aside(path: &Path, error: String) -> Note {
    let names = std::iter::once("broken".to_owned()).chain((2..100).map(|number| format!("broken.{number}")));
    let free = names.map(|name| beside(path, &name)).find(|name| name.symlink_metadata().is_err());
    let to = free.unwrap_or_else(|| beside(path, "broken"));
    match std::fs::rename(path, &to) {
        Ok(()) => Note::SetAside { error, to },
        Err(failure) => Note::Ignored { error: format!("{error}; it cannot be renamed: {failure}") },
    }
}

fn beside(path: &Path, ending: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".");
    name.push(ending);
    name.into()
}

#[cfg(test)]
mod tests {
    use super::super::statefile::ModelState;
    use super::*;

    fn learned(identity: &str, tokens: u64, rates: &[u32]) -> State {
        let model =
            ModelState { tokens, stamp: 7, heat: [("blk.0".to_owned(), rates.to_vec())].into(), ..Default::default() };
        State { models: [(identity.to_owned(), model)].into(), ..State::default() }
    }

    #[test]
    fn what_processes_add_is_merged() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("deep/moe-state.ini");
        assert_eq!(read(&path), (State::default(), None));
        assert_eq!(add(&path, &learned("a", 100, &[10, 30])).unwrap(), None);
        assert_eq!(add(&path, &learned("a", 300, &[30, 10])).unwrap(), None);
        assert_eq!(add(&path, &learned("b", 5, &[1])).unwrap(), None);
        let (state, note) = read(&path);
        assert_eq!(note, None);
        assert_eq!(state.models["a"].heat["blk.0"], [25, 15]);
        assert_eq!(state.models.len(), 2);
        let left: Vec<_> =
            std::fs::read_dir(path.parent().unwrap()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left.len(), 2, "the file and its lock: {left:?}");
    }

    #[test]
    fn many_writers_lose_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("moe-state.ini");
        // On a busy disk a writer may have to wait for longer than it does; it then has added nothing, and says so.
        let add_once = || loop {
            match add(&path, &learned("a", 10, &[8, 4])) {
                Ok(note) => return assert_eq!(note, None),
                Err(error) => assert!(error.to_string().contains("another process holds"), "{error}"),
            }
        };
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..5).for_each(|_| add_once()));
            }
        });
        let (state, note) = read(&path);
        assert_eq!((state.models["a"].tokens, note), (200, None));
    }

    #[test]
    fn a_broken_file_is_set_aside() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("moe-state.ini");
        for broken in [&b"format = 1\n[model x\n"[..], b"\xff\xfe", b"junk"] {
            std::fs::write(&path, broken).unwrap();
            let (state, note) = read(&path);
            assert_eq!(state, State::default());
            let Some(Note::SetAside { to, .. }) = note else { panic!("{note:?}") };
            assert_eq!(std::fs::read(to).unwrap(), broken);
            assert!(!path.exists());
        }
        assert!(add(&path, &learned("a", 1, &[1])).is_ok());
    }

    #[test]
    fn what_is_no_state_file_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf");
        for text in [&b"GGUF\x03\0\0"[..], b"[user]\nname = x\n", b"\xff\xfe"] {
            std::fs::write(&path, text).unwrap();
            assert!(matches!(read(&path).1, Some(Note::Ignored { error }) if error.contains("no state file")));
            assert!(add(&path, &learned("a", 1, &[1])).is_err());
            assert_eq!(std::fs::read(&path).unwrap(), text);
        }
        std::fs::write(&path, "format = 1\n[model x\n").unwrap();
        assert!(matches!(read(&path).1, Some(Note::SetAside { .. })), "a broken one of ours");
        for place in [Path::new("/"), folder.path(), Path::new("/dev/null")] {
            assert!(matches!(read(place).1, Some(Note::Ignored { .. })), "{place:?}");
            assert!(add(place, &learned("a", 1, &[1])).is_err(), "{place:?}");
        }
    }

    #[test]
    fn a_link_stays_and_broken_files_take_each_a_name() {
        let folder = tempfile::tempdir().unwrap();
        let (real, link) = (folder.path().join("real.ini"), folder.path().join("moe-state.ini"));
        std::fs::write(&real, "format = 1\n").unwrap();
        std::os::unix::fs::symlink(&real, &link).unwrap();
        add(&link, &learned("a", 5, &[1])).unwrap();
        assert!(link.is_symlink() && std::fs::read_to_string(&real).unwrap().contains("[model a]"));
        for number in 0..3 {
            std::fs::write(&real, format!("format = 1\nbroken {number}")).unwrap();
            let Some(Note::SetAside { to, .. }) = read(&real).1 else { panic!("set aside") };
            assert!(std::fs::read_to_string(to).unwrap().ends_with(&number.to_string()));
        }
    }

    #[test]
    fn a_lock_that_is_never_given_back_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("moe-state.ini");
        let held = File::create(beside(&path, "lock")).unwrap();
        held.lock().unwrap();
        let error = add(&path, &learned("a", 1, &[1])).unwrap_err();
        assert!(error.to_string().contains("another process holds"), "{error}");
    }

    #[test]
    fn a_file_of_a_later_release_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("moe-state.ini");
        std::fs::write(&path, "format = 9\nwhat ever").unwrap();
        assert!(matches!(read(&path).1, Some(Note::Ignored { error }) if error.contains("format 9")));
        assert!(add(&path, &learned("a", 1, &[1])).is_err());
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "format = 9\nwhat ever");
    }

    #[test]
    fn a_place_that_cannot_be_written_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("moe-state.ini");
        std::fs::create_dir(&path).unwrap();
        assert!(matches!(read(&path).1, Some(Note::Ignored { .. })));
        assert!(add(&path, &learned("a", 1, &[1])).is_err());
    }
}
