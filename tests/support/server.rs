//! A running `llama-server` on a free loopback port.

use std::net::TcpStream;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::http::{self, Port};
use super::process::{Finished, Running, tail};
use super::stock::{Side, tool};

/// How long a server may take to start or to stop on an idle machine, also on a software driver for GPUs.
const LIMIT: Duration = Duration::from_secs(60);

/// How long it may take to answer, or to do what its log tells.
const ANSWER: Duration = Duration::from_secs(300);

/// After so long a server that was interrupted and still runs is woken.
const MISSED: Duration = Duration::from_secs(5);

/// A server that has answered `/health`; dropping it kills it.
pub struct Server {
    process: Running,
    port: Port,
}

impl Server {
    /// Starts a server on a model with two threads and waits until it is ready.
    pub fn start(side: Side<'_>, model: &Path, more: &[&str]) -> Self {
        let mut command = tool("llama-server", side, model, 2);
        command.args(more);
        let mut server = Self::launch(&mut command);
        server.wait_ready();
        server
    }

    /// Starts a prepared command line on a free port and waits for nothing.
    pub fn launch(command: &mut Command) -> Self {
        Self::launch_online(command.arg("--offline"))
    }

    /// The same for a server that may fetch its model.
    pub fn launch_online(command: &mut Command) -> Self {
        let port = Port::hold();
        command.args(["--host", "127.0.0.1", "--port", &port.number().to_string()]);
        Self { process: Running::start(command), port }
    }

    /// Waits until the model is loaded; panics with the log when the server ends first.
    pub fn wait_ready(&mut self) {
        let port = self.port.number();
        self.process.wait_until("/health", LIMIT, |_| {
            http::request(port, "/health", None, Duration::from_secs(5)).is_ok_and(|answer| answer.status == 200)
        });
        // It says so before its main loop runs, which would forget an interrupt from before. What is asked of the slots is answered by that loop
        // (or refused: a router has none).
        let _ = http::request(port, "/slots", None, LIMIT);
    }

    /// Waits until the server has freed its model because nobody asked; it must have been started with a time for that.
    pub fn wait_asleep(&self) {
        let end = Instant::now() + ANSWER;
        while self.get("/props")["is_sleeping"] != true {
            assert!(Instant::now() < end, "not asleep within {ANSWER:?}\n{}", tail(&self.process.log(), 40));
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// Does something again and again until the log says what is waited for; panics with the end of the log when it never does.
    pub fn repeat_until(&self, what: &str, ready: impl Fn(&str) -> bool, mut again: impl FnMut()) {
        let end = Instant::now() + ANSWER;
        while !ready(&self.process.log()) {
            assert!(Instant::now() < end, "no {what} within {ANSWER:?}\n{}", tail(&self.process.log(), 40));
            again();
        }
    }

    /// The child behind the port.
    pub fn process(&mut self) -> &mut Running {
        &mut self.process
    }

    /// Gives up the port and returns the child.
    pub fn into_process(self) -> Running {
        self.process
    }

    /// Posts a JSON body and returns the JSON answer; panics unless its status is 200.
    pub fn post(&self, path: &str, body: &Value) -> Value {
        Self::parsed(path, self.answer(path, body))
    }

    /// Gets a JSON answer; panics unless its status is 200.
    pub fn get(&self, path: &str) -> Value {
        Self::parsed(path, self.request(path, None))
    }

    fn parsed(path: &str, answer: http::Answer) -> Value {
        assert_eq!(answer.status, 200, "{path}: {}", answer.body);
        serde_json::from_str(&answer.body).unwrap_or_else(|error| panic!("{path}: {error}: {}", answer.body))
    }

    /// Posts a JSON body and returns the answer of whatever status.
    pub fn answer(&self, path: &str, body: &Value) -> http::Answer {
        self.request(path, Some(&body.to_string()))
    }

    fn request(&self, path: &str, body: Option<&str>) -> http::Answer {
        http::request(self.port.number(), path, body, ANSWER)
            .unwrap_or_else(|error| panic!("{path}: {error}\n{}", tail(&self.process.log(), 40)))
    }

    /// Posts a JSON body and leaves the answer to be read from the connection.
    pub fn open(&self, path: &str, body: &Value) -> TcpStream {
        http::open(self.port.number(), path, Some(&body.to_string()), ANSWER).expect("the server takes connections")
    }

    /// Greedy tokens after a prompt, with the probabilities of the best `n_probs` at each position.
    pub fn complete(&self, prompt: &str, n_predict: u32, n_probs: u32) -> Completion {
        self.complete_with(prompt, n_predict, n_probs, &json!({}))
    }

    /// As [`Self::complete`], with more fields in the request.
    pub fn complete_with(&self, prompt: &str, n_predict: u32, n_probs: u32, more: &Value) -> Completion {
        let mut body = json!({
            "prompt": prompt, "n_predict": n_predict, "n_probs": n_probs, "temperature": 0, "seed": 1,
            "return_tokens": true,
        });
        for (key, value) in more.as_object().expect("more fields are an object") {
            body[key] = value.clone();
        }
        let answer = self.post("/completion", &body);
        let tokens = answer["tokens"].as_array().expect("return_tokens was asked for");
        assert!(!tokens.is_empty(), "no tokens in {answer}");
        Completion { tokens: tokens.clone(), probabilities: answer["completion_probabilities"].clone() }
    }

    /// Interrupts the server as Ctrl-C does and returns what it left; panics unless it exits with 0.
    ///
    /// A server that falls asleep at this moment misses the interrupt: its main thread looks for it before it waits. A request wakes it. (A
    /// second interrupt would end it at once and with another status.)
    pub fn stop(mut self) -> Finished {
        self.process.interrupt();
        let missed = Instant::now() + MISSED;
        while self.process.is_running() && Instant::now() < missed {
            thread::sleep(Duration::from_millis(5));
        }
        if self.process.is_running() {
            // It may be on its way to its end, and then answers nothing.
            let body = json!({"prompt": "a", "n_predict": 1}).to_string();
            let _ = http::request(self.port.number(), "/completion", Some(&body), MISSED);
        }
        self.process.finish(LIMIT).success()
    }
}

/// What a server generated.
#[derive(Clone, Debug, PartialEq)]
pub struct Completion {
    /// The token ids.
    pub tokens: Vec<Value>,
    /// For each token the best candidates and their log-probabilities as the server printed them.
    pub probabilities: Value,
}
