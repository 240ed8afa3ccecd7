//! A server of model files on this machine that answers llama.cpp as the model hub does: the commit of a branch, the files of a commit, and
//! the files themselves, whole or from a place on. Plain HTTP, one request per connection, nothing but std.
//!
//! Dropping it ends its thread; connections that are open then are served to their end.

use std::io::{self, BufRead as _, BufReader, Read as _, Seek as _, SeekFrom, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use serde_json::json;

/// The one commit of every repository.
const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

struct Shelf {
    /// Files as (repository, name, place).
    files: Vec<(String, String, PathBuf)>,
    /// Requests for contents: names of files.
    fetched: Mutex<Vec<String>>,
    closed: AtomicBool,
}

/// The running server.
pub struct Hub {
    port: u16,
    shelf: Arc<Shelf>,
    thread: Option<JoinHandle<()>>,
}

impl Hub {
    /// Serves files, each as (repository, name, place).
    pub fn open(files: &[(&str, &str, &Path)]) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free loopback port");
        let port = listener.local_addr().expect("a bound socket has an address").port();
        let owned = |(repository, name, path): &(&str, &str, &Path)| {
            ((*repository).to_owned(), (*name).to_owned(), path.to_path_buf())
        };
        let shelf = Arc::new(Shelf {
            files: files.iter().map(owned).collect(),
            fetched: Mutex::default(),
            closed: AtomicBool::new(false),
        });
        let own = Arc::clone(&shelf);
        let thread = thread::spawn(move || {
            while let Ok((stream, _)) = listener.accept() {
                if own.closed.load(Ordering::SeqCst) {
                    break;
                }
                let shelf = Arc::clone(&own);
                // A client that leaves in the middle is no failure of the server.
                thread::spawn(move || drop(shelf.serve(stream)));
            }
        });
        Self { port, shelf, thread: Some(thread) }
    }

    /// What `MODEL_ENDPOINT` of llama.cpp names.
    pub fn endpoint(&self) -> String {
        format!("http://127.0.0.1:{}/", self.port)
    }

    /// The address of a file.
    pub fn address(&self, repository: &str, name: &str) -> String {
        format!("{}{repository}/resolve/{COMMIT}/{name}", self.endpoint())
    }

    /// Names of the files whose contents were sent since this was asked last.
    pub fn take_fetched(&self) -> Vec<String> {
        let mut fetched = std::mem::take(&mut *self.shelf.fetched.lock().expect("a connection panicked"));
        fetched.sort();
        fetched
    }
}

impl Drop for Hub {
    fn drop(&mut self) {
        self.shelf.closed.store(true, Ordering::SeqCst);
        // Wakes the thread that waits for a connection.
        drop(TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)));
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Shelf {
    fn serve(&self, stream: TcpStream) -> io::Result<()> {
        stream.set_read_timeout(Some(Duration::from_secs(30)))?;
        let mut lines = BufReader::new(&stream).lines();
        let first = lines.next().unwrap_or_else(|| Ok(String::new()))?;
        let mut begin = None;
        for line in lines {
            let line = line?.to_ascii_lowercase();
            if line.is_empty() {
                break;
            }
            if let Some(range) = line.strip_prefix("range: bytes=") {
                begin = range.split('-').next().and_then(|number| number.parse::<u64>().ok());
            }
        }
        let mut words = first.split(' ');
        let (method, path) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        let path = path.split('?').next().unwrap_or_default();
        let whole = method == "GET";
        if let Some(api) = path.strip_prefix("/api/models/") {
            let body = self.listing(api);
            let status = if body.is_some() { "200 OK" } else { "404 Not Found" };
            let body = body.unwrap_or_else(|| json!({"error": "no such repository"})).to_string();
            return write!(
                &stream,
                "HTTP/1.1 {status}\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
                body.len()
            );
        }
        let wanted = |(repository, name, _): &&(String, String, PathBuf)| {
            path == format!("/{repository}/resolve/{COMMIT}/{name}")
                || path == format!("/{repository}/resolve/main/{name}")
        };
        let Some((_, name, place)) = self.files.iter().find(wanted) else {
            return write!(&stream, "HTTP/1.1 404 Not Found\r\nConnection: close\r\nContent-Length: 0\r\n\r\n");
        };
        let mut file = std::fs::File::open(place)?;
        let length = file.metadata()?.len();
        let from = begin.unwrap_or(0).min(length);
        file.seek(SeekFrom::Start(from))?;
        let (status, range) = match begin {
            Some(_) => ("206 Partial Content", format!("Content-Range: bytes {from}-{}/{length}\r\n", length - 1)),
            None => ("200 OK", String::new()),
        };
        write!(
            &stream,
            "HTTP/1.1 {status}\r\nConnection: close\r\nAccept-Ranges: bytes\r\nETag: \"{length:x}\"\r\n{range}Content-Length: {}\r\n\r\n",
            length - from
        )?;
        if whole {
            self.fetched.lock().expect("a connection panicked").push(name.clone());
            io::copy(&mut file.take(length - from), &mut &stream)?;
        }
        Ok(())
    }

    /// `REPOSITORY/refs` or `REPOSITORY/tree/COMMIT`.
    fn listing(&self, path: &str) -> Option<serde_json::Value> {
        let files = |repository: &str| {
            self.files.iter().filter(move |file| file.0 == repository).enumerate().collect::<Vec<_>>()
        };
        if let Some(repository) = path.strip_suffix("/refs") {
            return (!files(repository).is_empty())
                .then(|| json!({"branches": [{"name": "main", "targetCommit": COMMIT}], "tags": []}));
        }
        let repository = path.strip_suffix(COMMIT)?.strip_suffix("/tree/")?;
        let entry = |(number, (_, name, place)): &(usize, &(String, String, PathBuf))| {
            let size = place.metadata().map_or(0, |data| data.len());
            json!({"type": "file", "path": name, "size": size, "oid": format!("{number:040x}"),
                "lfs": {"oid": format!("{number:064x}"), "size": size}})
        };
        let files = files(repository);
        (!files.is_empty()).then(|| files.iter().map(entry).collect())
    }
}
