//! A llama-server that is asked over a local socket, with the time at which each token of an answer arrived.

use std::fs::File;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use ggml_moe::bench::output::reason;
use serde_json::{Value, json};

use crate::host::{CommandError, Failed};

/// How often a server that starts is asked whether it is ready.
const POLL: Duration = Duration::from_millis(100);

/// A server, which ends with this.
pub(crate) struct Server {
    child: Child,
    port: u16,
    log: PathBuf,
    limit: Duration,
}

/// An answer: when its tokens came, in ms from the request, and the last message.
pub(crate) struct Streamed {
    pub(crate) arrivals_ms: Vec<f64>,
    pub(crate) last: Value,
}

impl Server {
    /// A free port. Another program may take it before the server does; then the server says so.
    pub(crate) fn free_port() -> std::io::Result<u16> {
        Ok(TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port())
    }

    /// Starts a command that listens at `port` and waits until it is ready. Its output goes to `log`.
    pub(crate) fn start(mut command: Command, port: u16, log: &Path, limit: Duration) -> Result<Self, CommandError> {
        let told = |error: std::io::Error| Failed(format!("llama-server: {error}"));
        let file = File::create(log).map_err(|error| Failed(format!("{}: {error}", log.display())))?;
        let errors = file.try_clone().map_err(told)?;
        let child = command.stdin(Stdio::null()).stdout(file).stderr(errors).spawn().map_err(told)?;
        let mut server = Self { child, port, log: log.to_owned(), limit };
        let begin = Instant::now();
        loop {
            if let Some(status) = server.child.try_wait().map_err(told)? {
                return Err(Failed(format!("llama-server ended with {status}: {}", server.reason())));
            }
            if server.get("/health").is_ok() {
                return Ok(server);
            }
            if begin.elapsed() >= limit {
                return Err(Failed(format!("llama-server was not ready after {} s (--timeout)", limit.as_secs())));
            }
            thread::sleep(POLL);
        }
    }

    /// What it printed.
    pub(crate) fn text(&self) -> String {
        std::fs::read(&self.log).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default()
    }

    fn reason(&self) -> String {
        reason(&self.text()).unwrap_or("it printed nothing").to_owned()
    }

    fn connect(&self, request: &str) -> std::io::Result<BufReader<TcpStream>> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port))?;
        stream.set_read_timeout(Some(self.limit))?;
        stream.set_nodelay(true)?;
        stream.write_all(request.as_bytes())?;
        Ok(BufReader::new(stream))
    }

    /// The JSON of an answer with status 200.
    pub(crate) fn get(&self, path: &str) -> Result<Value, CommandError> {
        let request = format!("GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n");
        let told = |error: std::io::Error| Failed(format!("llama-server: {path}: {error}"));
        let mut answer = Vec::new();
        self.connect(&request).map_err(told)?.read_to_end(&mut answer).map_err(told)?;
        let answer = String::from_utf8_lossy(&answer);
        let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_default();
        if !head.starts_with("HTTP/1.1 200") {
            return Err(Failed(format!("llama-server: {path}: {}", head.lines().next().unwrap_or("no answer"))));
        }
        // The length of a piece may stand before it.
        let body = body.find('{').and_then(|from| body.get(from..)).unwrap_or_default();
        let mut values = serde_json::Deserializer::from_str(body).into_iter();
        values.next().and_then(Result::ok).ok_or_else(|| Failed(format!("llama-server: {path}: no JSON")))
    }

    /// Asks for so many tokens after a prompt of token numbers. What it holds of the prompt from before is used if `cached`.
    pub(crate) fn complete(&self, prompt: &[u32], tokens: u32, cached: bool) -> Result<Streamed, CommandError> {
        let body = json!({
            "prompt": prompt, "n_predict": tokens, "temperature": 0, "seed": 1, "stream": true, "ignore_eos": true,
            "timings_per_token": true, "cache_prompt": cached,
        })
        .to_string();
        let request = format!(
            "POST /completion HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Type: application/json\r\n\
             Content-Length: {}\r\n\r\n{body}",
            body.len()
        );
        let told = |error: std::io::Error| Failed(format!("llama-server: /completion: {error}"));
        let begin = Instant::now();
        let mut reader = self.connect(&request).map_err(told)?;
        let (mut arrivals_ms, mut last, mut line) = (Vec::new(), Value::Null, String::new());
        loop {
            line.clear();
            if reader.read_line(&mut line).map_err(told)? == 0 {
                break;
            }
            let Some(message) = line.strip_prefix("data: ").and_then(|text| serde_json::from_str(text).ok()) else {
                continue;
            };
            let now = begin.elapsed().as_secs_f64() * 1e3;
            last = message;
            arrived(&mut arrivals_ms, last["timings"]["predicted_n"].as_u64().unwrap_or(0), now);
        }
        let count = arrivals_ms.len();
        if count != tokens as usize {
            return Err(Failed(format!("llama-server: {count} of {tokens} tokens came: {}", self.reason())));
        }
        Ok(Streamed { arrivals_ms, last })
    }
}

/// Tokens up to a number are there. One whose text is no whole character comes with the next: its time lies between its neighbours'.
fn arrived(arrivals_ms: &mut Vec<f64>, number: u64, now: f64) {
    let missing = number.saturating_sub(arrivals_ms.len() as u64);
    let before = arrivals_ms.last().copied().unwrap_or(now);
    arrivals_ms.extend((1..=missing).map(|place| before + (now - before) * place as f64 / missing as f64));
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// MoE blocks that a process counts behind its socket; 0 if it has none.
pub(crate) fn blocks(socket: &Path) -> u64 {
    let mut answer = String::new();
    let read = UnixStream::connect(socket).and_then(|mut stream| {
        stream.set_read_timeout(Some(Duration::from_secs(5)))?;
        stream.read_to_string(&mut answer)
    });
    let told: Value = read.ok().and_then(|_| serde_json::from_str(&answer).ok()).unwrap_or_default();
    let devices = told["devices"].as_array().into_iter().flatten();
    devices.filter_map(|device| device["counters"]["blocks"].as_u64()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_that_come_together_share_the_time() {
        let mut arrivals = Vec::new();
        for (number, now) in [(1, 10.0), (1, 11.0), (2, 12.0), (4, 16.0)] {
            arrived(&mut arrivals, number, now);
        }
        assert_eq!(arrivals, [10.0, 12.0, 14.0, 16.0]);
    }
}
