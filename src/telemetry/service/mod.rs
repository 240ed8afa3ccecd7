//! The socket through which the counters of this process can be read.
//!
//! Whoever connects gets one line of JSON, after which the connection is closed; nothing is read from him. `ggml-moe top` is such a reader.
//!
//! Owns: the socket, its file, and the thread `ggml-moe-top` that serves it.
//! Invariants: only a process of the same user gets an answer; an answer is handed to the system at once or given up, so nobody who
//! connects can hold anything; a failure costs the socket and never the host. The thread gets no signals, catches its panics, and is
//! stopped before the host takes down what was there before it (its log, say).
//! Threads: started once by whoever runs a graph; stopped by the thread that ends the process.
//! Does not: know what is told (`board` does).

mod place;
mod system;

use std::ffi::OsStr;
use std::io::{self, Read as _};
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver};
use std::time::Duration;

use parking_lot::Mutex;

use super::{board, log};
use crate::config::Socket;

/// Enough for making the answer and for a line of the host's log.
const STACK_BYTES: usize = 512 << 10;
/// How long the end of the process waits for an answer that is being made.
const STOP: Duration = Duration::from_secs(2);
/// How long it waits for the lock, which nobody has for long.
const LOCK: Duration = Duration::from_millis(200);
/// Answers between two looks at the requests.
const ANSWERS_PER_TURN: usize = 64;
/// After a failure to accept (too many open files), nobody is answered for so long.
const REST_MS: u64 = 200;
/// The largest answer that is read, and how long it may take.
const LONGEST_ANSWER: u64 = 4 << 20;
const ANSWER: Duration = Duration::from_secs(2);

/// The service of this process.
struct Service {
    path: PathBuf,
    /// Device and number of the socket's file, so that no other is removed.
    file: Option<(u64, u64)>,
    pid: u32,
    bell: UnixStream,
    ended: Receiver<()>,
}

static STARTED: AtomicBool = AtomicBool::new(false);
static STOPPING: AtomicBool = AtomicBool::new(false);
static SERVICE: Mutex<Option<Service>> = Mutex::new(None);

/// Starts the service, once, as the setting says. `working`: there is a cache, or something else that an automatic service is for.
pub(crate) fn start(setting: &Socket, working: bool) {
    let wanted = match setting {
        Socket::Off => false,
        Socket::Auto => working,
        Socket::Path(_) => true,
    };
    if !wanted || STARTED.swap(true, Ordering::Relaxed) {
        return;
    }
    let made = match setting {
        Socket::Path(path) => bind(path),
        _ => automatic(),
    };
    match made.and_then(|(listener, path)| serve_in_background(listener, path)) {
        Ok(path) => log::info(&format!("counters can be read at {} (ggml-moe top)", path.display())),
        // Nobody asked for the automatic one.
        Err(reason) if *setting == Socket::Auto => log::info(&format!("no socket for counters: {reason}")),
        Err(reason) => log::notice(&format!("no socket for counters: {reason}; set socket=auto or another path")),
    }
}

fn bind(path: &Path) -> Result<(UnixListener, PathBuf), String> {
    let listener = place::bind(path).map_err(|error| format!("{}: {error}", path.display()))?;
    Ok((listener, path.to_owned()))
}

fn automatic() -> Result<(UnixListener, PathBuf), String> {
    let mut reasons = Vec::new();
    for folder in place::folders() {
        let made = place::make_private(&folder).map_err(|error| format!("{}: {error}", folder.display()));
        let bound = made.and_then(|()| {
            place::clean(&folder);
            bind(&place::name(&folder, std::process::id()))
        });
        match bound {
            Ok(made) => return Ok(made),
            Err(reason) => reasons.push(reason),
        }
    }
    Err(reasons.join("; "))
}

fn serve_in_background(listener: UnixListener, path: PathBuf) -> Result<PathBuf, String> {
    let remove = |reason: String| {
        // It serves nobody.
        let _ = std::fs::remove_file(&path);
        reason
    };
    let (bell, rung) = UnixStream::pair().map_err(|error| remove(error.to_string()))?;
    if let Err(error) = rung.set_nonblocking(true) {
        return Err(remove(error.to_string()));
    }
    let file = std::fs::symlink_metadata(&path).ok().map(|found| (found.dev(), found.ino()));
    let (end, ended) = mpsc::channel();
    let thread = move || {
        let served = std::panic::catch_unwind(|| serve(&listener, &rung));
        if served.is_err() {
            // The panic has printed a line of its own; the host's log is not worth another one.
        }
        // Nobody may wait any more.
        let _ = end.send(());
    };
    let builder = std::thread::Builder::new().name("ggml-moe-top".to_owned()).stack_size(STACK_BYTES);
    if let Err(error) = system::without_signals(|| builder.spawn(thread)) {
        return Err(remove(format!("no thread ({error})")));
    }
    *SERVICE.lock() = Some(Service { path: path.clone(), file, pid: std::process::id(), bell, ended });
    if !system::at_exit(stop_at_exit) {
        stop();
        return Err("the end of the process cannot be waited for".to_owned());
    }
    Ok(path)
}

/// A request began: the thread is to notice when it is over.
pub(super) fn ring() {
    if let Some(service) = &*SERVICE.lock() {
        // If the bell has rung often enough already, the thread is awake.
        let _ = system::send(&service.bell, &[0]);
    }
}

extern "C" fn stop_at_exit() {
    if std::panic::catch_unwind(stop).is_err() {
        // The process ends anyway.
    }
}

/// Stops the thread and removes the socket; in a process that was split off, does nothing.
fn stop() {
    // A host may exit in a signal handler, on a thread that has this lock.
    let service = SERVICE.try_lock_for(LOCK).and_then(|mut service| service.take());
    let Some(service) = service.filter(|service| service.pid == std::process::id()) else { return };
    STOPPING.store(true, Ordering::Release);
    let _ = system::send(&service.bell, &[0]);
    // In vain if the thread is stuck in the host's log, which is about to go: nothing better can be done.
    let _ = service.ended.recv_timeout(STOP);
    let file = std::fs::symlink_metadata(&service.path).ok().map(|found| (found.dev(), found.ino()));
    if file.is_some() && file == service.file {
        // Somebody else may have been faster.
        let _ = std::fs::remove_file(&service.path);
    }
}

/// The life of the thread.
fn serve(listener: &UnixListener, rung: &UnixStream) {
    // Not what the kernel calls the thread: that ends after fifteen characters.
    let file = std::env::current_exe().ok();
    let program = file.as_deref().and_then(Path::file_name).map(OsStr::to_string_lossy).unwrap_or_default();
    let mut rest = false;
    loop {
        let next_ms = board::tick().map(|us| us.div_ceil(1000));
        let both: [&dyn AsRawFd; 2] = [rung, listener];
        let (sources, limit) = if rest { (&both[..1], Some(REST_MS)) } else { (&both[..], None) };
        let timeout = next_ms.into_iter().chain(limit).min();
        system::wait(sources, timeout);
        let mut rings = [0; 64];
        while (&mut &*rung).read(&mut rings).is_ok_and(|count| count == rings.len()) {}
        if STOPPING.load(Ordering::Acquire) {
            return;
        }
        rest = !answer_those_who_wait(listener, &program);
    }
}

/// False if the system gives no more connections now.
fn answer_those_who_wait(listener: &UnixListener, program: &str) -> bool {
    for _ in 0..ANSWERS_PER_TURN {
        match listener.accept() {
            Ok((stream, _)) => {
                if system::peer_uid(&stream) == Some(system::own_uid()) {
                    let answer = format!("{}\n", board::snapshot(program));
                    // A fresh connection takes it whole; what it does not take is lost to its reader alone.
                    let _ = system::send(&stream, answer.as_bytes());
                }
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return true,
            // The one who connected is gone.
            Err(error) if matches!(error.kind(), io::ErrorKind::ConnectionAborted | io::ErrorKind::Interrupted) => {}
            Err(_) => return false,
        }
    }
    true
}

/// The sockets of this user's processes.
pub fn sockets() -> Vec<PathBuf> {
    place::folders().iter().flat_map(|folder| place::sockets(folder)).collect()
}

/// Asks the process behind a socket. An empty answer is a refusal.
pub fn ask(path: &Path) -> io::Result<String> {
    let stream = UnixStream::connect(path)?;
    stream.set_read_timeout(Some(ANSWER))?;
    let mut text = String::new();
    stream.take(LONGEST_ANSWER).read_to_string(&mut text)?;
    if text.is_empty() {
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, "it answers its own user only"));
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All of the service's life; it is one for the process, so it is one test.
    #[test]
    fn the_service_answers_and_ends() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("own.sock");
        start(&Socket::Off, true);
        start(&Socket::Auto, false);
        start(&Socket::Path(path.clone()), false);
        start(&Socket::Path(place.path().join("second.sock")), false);
        assert!(path.exists() && !place.path().join("second.sock").exists());
        let answer = || serde_json::from_str::<serde_json::Value>(&ask(&path).unwrap()).unwrap();
        assert_eq!(answer()["pid"], std::process::id());

        // Nobody is held up by those who never read, or who are gone at once, and the host is not ended by a signal.
        let silent: Vec<UnixStream> = (0..200).map(|_| UnixStream::connect(&path).unwrap()).collect();
        (0..200).for_each(|_| drop(UnixStream::connect(&path)));
        assert_eq!(answer()["format"], 1);
        drop(silent);
        for _ in 0..10_000 {
            ring();
        }
        assert_eq!(answer()["format"], 1);

        stop();
        assert!(!path.exists(), "the socket is gone");
        ring();
        assert!(ask(&path).is_err());
    }
}
