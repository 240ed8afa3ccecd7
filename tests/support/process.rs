//! A child process with a time limit, captured output and a guard that kills it.
//!
//! Each child leads a process group of its own, so that the guard also ends what the child started. Two threads per child
//! read its output; they end when the child closes it.

use std::io::Read;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Limits are what an idle machine needs at the very most; a busy one gets so many times as long. They end a host that hangs, and measure
/// nothing.
pub const BUSY: u32 = 5;

/// How often a waiting test looks again.
const POLL: Duration = Duration::from_millis(5);

/// What a finished child left behind.
#[derive(Clone, Debug)]
pub struct Finished {
    /// The command line, for reports.
    pub command: String,
    /// How it ended.
    pub status: ExitStatus,
    /// Its standard output.
    pub stdout: String,
    /// Its standard error.
    pub stderr: String,
}

impl Finished {
    /// Both outputs, standard output first.
    pub fn log(&self) -> String {
        format!("{}{}", self.stdout, self.stderr)
    }

    /// Panics with the end of the output unless the child exited with 0.
    pub fn success(self) -> Self {
        assert!(self.status.success(), "{}", self.report("expected exit status 0"));
        self
    }

    /// Panics unless the child left by itself with a status that is not 0: a host's own error, not a crash.
    pub fn clean_failure(self) -> Self {
        assert!(self.status.code().is_some_and(|code| code != 0), "{}", self.report("expected a clean failure"));
        self
    }

    /// Panics when a signal ended the child: a crash, an abort, or a kill.
    pub fn no_signal(self) -> Self {
        assert!(self.status.signal().is_none(), "{}", self.report("ended by a signal"));
        self
    }

    /// The command, its status and the end of its output under one heading.
    pub fn report(&self, heading: &str) -> String {
        format!("{heading}: {}\n{}\n{}", self.status, self.command, tail(&self.log(), 40))
    }

    /// The lines of both outputs that hold `needle`.
    pub fn lines_with(&self, needle: &str) -> Vec<String> {
        self.log().lines().filter(|line| line.contains(needle)).map(str::to_owned).collect()
    }
}

/// The last `count` lines of a text.
pub fn tail(text: &str, count: usize) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(count)..].join("\n")
}

/// Runs a command to its end; panics when it takes longer than `limit` on an idle machine.
pub fn run(command: &mut Command, limit: Duration) -> Finished {
    Running::start(command).finish(limit)
}

/// The same command with the signals that end programs doing what they do by default. A test run in the background of a script inherits a
/// shell's choice to ignore Ctrl-C, one under nohup that of hang-ups, and so does everything that it starts.
pub fn interruptible(command: &Command) -> Command {
    let mut wrapped = Command::new("env");
    wrapped.arg("--default-signal=HUP,INT,TERM").arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => wrapped.env(name, value),
            None => wrapped.env_remove(name),
        };
    }
    wrapped
}

/// One captured output stream, growing while the child runs.
#[derive(Default)]
struct Stream {
    bytes: Mutex<Vec<u8>>,
    grown: Condvar,
}

impl Stream {
    fn text(&self) -> String {
        String::from_utf8_lossy(&self.bytes.lock().expect("reader thread panicked")).into_owned()
    }

    fn read_from(self: &Arc<Self>, mut source: impl Read + Send + 'static) -> JoinHandle<()> {
        let stream = Arc::clone(self);
        thread::spawn(move || {
            let mut block = [0; 8192];
            while let Ok(count @ 1..) = source.read(&mut block) {
                stream.bytes.lock().expect("waiting thread panicked").extend_from_slice(&block[..count]);
                stream.grown.notify_all();
            }
        })
    }
}

/// A child that runs; dropping it kills its process group.
pub struct Running {
    child: Child,
    command: String,
    stdout: Arc<Stream>,
    stderr: Arc<Stream>,
    readers: Vec<JoinHandle<()>>,
}

impl Running {
    /// Starts a command with no input and both outputs captured.
    pub fn start(command: &mut Command) -> Self {
        let line = format!("{command:?}");
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
        let mut child = command.spawn().unwrap_or_else(|error| panic!("cannot start {line}: {error}"));
        let (stdout, stderr) = (Arc::<Stream>::default(), Arc::<Stream>::default());
        let readers = vec![
            stdout.read_from(child.stdout.take().expect("stdout is piped")),
            stderr.read_from(child.stderr.take().expect("stderr is piped")),
        ];
        Self { child, command: line, stdout, stderr, readers }
    }

    /// The child's process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Both outputs so far.
    pub fn log(&self) -> String {
        format!("{}{}", self.stdout.text(), self.stderr.text())
    }

    /// Whether the child still runs.
    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().expect("the child can be waited for").is_none()
    }

    /// Waits until `ready` holds of the outputs; panics when the child ends before that or the limit passes.
    pub fn wait_until(&mut self, what: &str, limit: Duration, mut ready: impl FnMut(&str) -> bool) {
        let (begin, end) = (Instant::now(), Instant::now() + limit * BUSY);
        loop {
            let alive = self.is_running();
            let log = self.log();
            if ready(&log) {
                return;
            }
            assert!(alive, "the host ended before {what}:\n{}\n{}", self.command, tail(&log, 40));
            let waited = begin.elapsed();
            assert!(Instant::now() < end, "no {what} within {waited:?}:\n{}\n{}", self.command, tail(&log, 40));
            thread::sleep(POLL);
        }
    }

    /// Sends the interrupt that Ctrl-C sends.
    pub fn interrupt(&self) {
        assert!(signal("INT", &self.id().to_string()), "cannot interrupt {}", self.command);
    }

    /// Sends the signal that service managers and `kill` send.
    pub fn terminate(&self) {
        assert!(signal("TERM", &self.id().to_string()), "cannot terminate {}", self.command);
    }

    /// Waits for the end; kills the child and panics when it takes longer than `limit` from now, as an idle machine counts.
    pub fn finish(mut self, limit: Duration) -> Finished {
        let limit = limit * BUSY;
        let end = Instant::now() + limit;
        let status = loop {
            if let Some(status) = self.child.try_wait().expect("the child can be waited for") {
                break status;
            }
            assert!(Instant::now() < end, "over {limit:?}: {}\n{}", self.command, tail(&self.log(), 40));
            thread::sleep(POLL);
        };
        for reader in self.readers.drain(..) {
            reader.join().expect("reader thread panicked");
        }
        Finished { command: self.command.clone(), status, stdout: self.stdout.text(), stderr: self.stderr.text() }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // A destructor must not panic: a child that is gone already is what is wanted, and the wait only reaps.
        if matches!(self.child.try_wait(), Ok(None)) && signal("KILL", &format!("-{}", self.id())) {
            let _ = self.child.wait();
        }
    }
}

/// Sends a signal through the shell's own `kill`, so that the tests need no unsafe code and no package.
fn signal(name: &str, target: &str) -> bool {
    let sent = Command::new("sh").args(["-c", &format!("kill -s {name} -- {target}")]).status();
    sent.is_ok_and(|status| status.success())
}
