//! A program that is run to its end, at most so long, with its output kept.
//!
//! The child stays in our process group, so that an interrupt from the terminal reaches it, too.

use std::io::Read;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// The most that is kept of each stream.
const MOST_BYTES: usize = 64 << 20;
/// How often the child is looked at: rarely, because it is being measured.
const POLL: Duration = Duration::from_millis(50);
/// How long after the end of a child its streams may stay open: a child of its own may hold them.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// A program that ended.
pub(crate) struct Finished {
    /// How; `None` if it was stopped because its time was over.
    pub(crate) status: Option<ExitStatus>,
    /// Standard output.
    pub(crate) stdout: String,
    /// Standard error.
    pub(crate) stderr: String,
    /// How long it ran.
    pub(crate) seconds: f64,
}

impl Finished {
    /// Both streams.
    pub(crate) fn log(&self) -> String {
        format!("{}\n{}", self.stdout, self.stderr)
    }
}

struct Stream {
    bytes: Arc<Mutex<Vec<u8>>>,
    reader: JoinHandle<()>,
}

impl Stream {
    fn read(mut source: impl Read + Send + 'static) -> Self {
        let bytes = Arc::<Mutex<Vec<u8>>>::default();
        let kept = Arc::clone(&bytes);
        let reader = thread::spawn(move || {
            let mut block = [0; 1 << 14];
            while let Ok(count @ 1..) = source.read(&mut block) {
                let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
                if kept.len() < MOST_BYTES {
                    kept.extend_from_slice(&block[..count]);
                }
            }
        });
        Self { bytes, reader }
    }

    fn text(&self, until: Instant) -> String {
        while !self.reader.is_finished() && Instant::now() < until {
            thread::sleep(Duration::from_millis(5));
        }
        String::from_utf8_lossy(&self.bytes.lock().unwrap_or_else(PoisonError::into_inner)).into_owned()
    }
}

/// Runs a command.
pub(crate) fn run(command: &mut Command, limit: Duration) -> std::io::Result<Finished> {
    let begin = Instant::now();
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let stdout = child.stdout.take().map(Stream::read);
    let stderr = child.stderr.take().map(Stream::read);
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break Some(status);
        }
        if begin.elapsed() >= limit {
            // It may have ended by itself in this moment.
            let _ = child.kill();
            child.wait()?;
            break None;
        }
        thread::sleep(POLL);
    };
    let seconds = begin.elapsed().as_secs_f64();
    let until = Instant::now() + LAST_WORDS;
    let text = |stream: Option<Stream>| stream.map_or_else(String::new, |stream| stream.text(until));
    Ok(Finished { status, stdout: text(stdout), stderr: text(stderr), seconds })
}
