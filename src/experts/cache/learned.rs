//! What a cache remembers from run to run: the heat of a model's experts, in the state file.
//!
//! Owns: which model this is and where its state lies, what of the present heat the file has already, the writing.
//! Invariants: a graph never waits for a disk: the file is written by a short-lived thread, one at a time. What a write could not bring into
//! the file is kept for the next one. No failure here ends anything: it is told once, in one line.
//! Threads: whoever has the cache, and the thread that writes. At the end of a model or a backend the write is waited for, for a while.
//! Does not: know the format (`statefile`), or how files are replaced (`statestore`).

use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::experts::heat::Heat;
use crate::experts::shape::Shape;
use crate::experts::statefile::{ModelState, State};
use crate::experts::statestore::{self, Note};
use crate::telemetry::log;

/// Tokens between two writes.
const WRITE_TOKENS: u32 = 4096;
/// Time between two writes, if so many tokens were decoded.
const WRITE_US: u64 = 180_000_000;
const LEAST_TOKENS: u32 = 64;
/// How long the end of a model waits for the disk, and for other processes that write, of which it is told sooner if they do not end. It takes
/// some milliseconds but on a busy machine. A slower disk is written to all the same, if the process goes on; hosts hold locks meanwhile.
const LONGEST_WAIT: Duration = Duration::from_millis(2_500);

/// A write under way.
struct Writing {
    /// The heat that the file has when it is done.
    heat: Heat,
    done: Receiver<Result<(), String>>,
}

/// The memory of one cache.
pub(super) struct Learned {
    /// The device, for lines in the log.
    label: String,
    path: PathBuf,
    identity: String,
    /// The name of each group's first tensor.
    groups: Vec<String>,
    /// What the file has.
    written: Heat,
    writing: Option<Writing>,
    tokens: u32,
    last_write_us: u64,
    told: bool,
}

impl Learned {
    /// Reads the state of a model; the heat that it gives, too.
    pub(super) fn open(
        label: &str,
        path: PathBuf,
        identity: String,
        groups: Vec<String>,
        shape: &Shape,
    ) -> (Self, Heat) {
        let (state, note) = statestore::read(&path);
        let model = state.models.get(&identity);
        let heat = model.map_or_else(|| Heat::new(shape.blocks()), |model| model.to_heat(shape, &groups));
        let mut learned = Self {
            label: label.to_owned(),
            path,
            identity,
            groups,
            written: heat.clone(),
            writing: None,
            tokens: 0,
            last_write_us: 0,
            told: false,
        };
        if let Some(note) = note {
            learned.tell_note(&note);
        }
        if let Some(model) = model.filter(|model| model.tokens > 0) {
            log::notice(&format!(
                "{}: {} tokens of this model are remembered (state-file {}, model {}): the experts used most are loaded first",
                learned.label,
                model.tokens,
                learned.path.display(),
                learned.identity
            ));
        }
        (learned, heat)
    }

    /// Some tokens were decoded. Begins to write when it is time.
    pub(super) fn note(&mut self, heat: &Heat, shape: &Shape, tokens: u32, now_us: u64) {
        self.tokens = self.tokens.saturating_add(tokens);
        let is_late = now_us.saturating_sub(self.last_write_us) >= WRITE_US && self.tokens >= LEAST_TOKENS;
        if self.tokens >= WRITE_TOKENS || is_late {
            (self.tokens, self.last_write_us) = (0, now_us);
            self.write(heat, shape);
        }
    }

    /// The model or a backend ends: writes what is not in the file yet, and waits for it.
    pub(super) fn finish(&mut self, heat: &Heat, shape: &Shape) {
        self.wait();
        self.write(heat, shape);
        self.wait();
    }

    fn write(&mut self, heat: &Heat, shape: &Shape) {
        self.collect(Duration::ZERO);
        if self.writing.is_some() {
            return; // a slow disk: later
        }
        let Some(seen) = heat.since(&self.written).filter(|seen| seen.tokens() >= 1.0) else { return };
        let stamp = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
        let model = ModelState::from_heat(&seen, shape, &self.groups, stamp);
        let state = State { models: [(self.identity.clone(), model)].into(), ..State::default() };
        let path = self.path.clone();
        let (send, done) = channel();
        let work = move || {
            let write = || statestore::add(&path, &state).map_err(|error| error.to_string());
            let outcome = std::panic::catch_unwind(write).unwrap_or_else(|_| Err("a panic".to_owned()));
            let _ = send.send(outcome.map(|_| ())); // nobody waits any more
        };
        match std::thread::Builder::new().name("ggml-moe-state".to_owned()).spawn(work) {
            Ok(_) => self.writing = Some(Writing { heat: heat.clone(), done }),
            Err(error) => self.tell(&format!("no thread to write it with ({error})")),
        }
    }

    fn wait(&mut self) {
        self.collect(LONGEST_WAIT);
    }

    /// Takes the outcome of a write, if it is there in time.
    fn collect(&mut self, patience: Duration) {
        let Some(writing) = &self.writing else { return };
        match writing.done.recv_timeout(patience) {
            Ok(Ok(())) => {
                if let Some(writing) = self.writing.take() {
                    self.written = writing.heat;
                }
            }
            Ok(Err(error)) => {
                self.writing = None;
                self.tell(&error);
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => self.writing = None,
        }
    }

    fn tell(&mut self, error: &str) {
        if !std::mem::replace(&mut self.told, true) {
            log::notice(&format!(
                "{}: what was learned about the model cannot be kept in {}: {error}; set state-file to another path, or to off",
                self.label,
                self.path.display()
            ));
        }
    }

    fn tell_note(&mut self, note: &Note) {
        match note {
            Note::SetAside { error, to } => log::notice(&format!(
                "{}: the state file {} was broken ({error}): it is now {}, and what was learned begins anew",
                self.label,
                self.path.display(),
                to.display()
            )),
            Note::Ignored { error } => self.tell(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experts::shape::{Group, GroupId};
    use std::path::Path;

    fn shape() -> Shape {
        Shape::new(vec![Group { experts: 4, used: 1, pool: 0 }; 2]).unwrap()
    }

    fn open(path: &Path, identity: &str) -> (Learned, Heat) {
        let groups = vec!["blk.0.gate".to_owned(), "blk.1.gate".to_owned()];
        Learned::open("MoE0", path.to_path_buf(), identity.to_owned(), groups, &shape())
    }

    /// Uses one expert of the first group for some tokens.
    fn learn(heat: &mut Heat, expert: u32, tokens: u32) {
        let block = shape().block(GroupId(0), expert).unwrap();
        for _ in 0..tokens {
            heat.add(block);
            heat.advance(1);
        }
    }

    /// The end of a model, on a disk that has as much time as it wants.
    fn finish(learned: &mut Learned, heat: &Heat) {
        learned.finish(heat, &shape());
        waited(learned);
    }

    fn waited(learned: &mut Learned) {
        while learned.writing.is_some() {
            learned.wait();
        }
    }

    fn hottest(path: &Path, identity: &str) -> Vec<u32> {
        let (_, heat) = open(path, identity);
        heat.hottest().into_iter().map(|block| shape().key(block).1).collect()
    }

    #[test]
    fn what_one_run_learned_the_next_one_knows() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("deep/moe-state.ini");
        let (mut learned, mut heat) = open(&path, "a");
        learn(&mut heat, 2, 300);
        learn(&mut heat, 1, 100);
        finish(&mut learned, &heat);
        assert_eq!(hottest(&path, "a"), [2, 1]);
        assert!(hottest(&path, "b").is_empty(), "another model knows nothing of it");
        let (mut second, mut heat) = open(&path, "a");
        learn(&mut heat, 1, 900);
        finish(&mut second, &heat);
        assert_eq!(hottest(&path, "a"), [1, 2]);
        // Nothing is added twice.
        let before = std::fs::read_to_string(&path).unwrap();
        finish(&mut second, &heat);
        assert_eq!(std::fs::read_to_string(&path).unwrap(), before);
    }

    #[test]
    fn it_is_written_after_many_tokens_or_after_a_while() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("moe-state.ini");
        let (mut learned, mut heat) = open(&path, "a");
        learn(&mut heat, 3, 100);
        learned.note(&heat, &shape(), 100, 1_000_000);
        assert!(learned.writing.is_none());
        learned.note(&heat, &shape(), WRITE_TOKENS - 100, 2_000_000);
        assert!(learned.writing.is_some());
        waited(&mut learned);
        assert!(path.exists());
        learn(&mut heat, 3, 100);
        learned.note(&heat, &shape(), 100, 2_000_000 + WRITE_US - 1);
        assert!(learned.writing.is_none());
        learned.note(&heat, &shape(), 1, 2_000_000 + WRITE_US);
        assert!(learned.writing.is_some());
        waited(&mut learned);
        let (_, heat) = open(&path, "a");
        assert!((heat.tokens() - 200.0).abs() < 5.0, "{}", heat.tokens());
    }

    #[test]
    fn what_could_not_be_written_is_written_later() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("moe-state.ini");
        let (mut learned, mut heat) = open(&path, "a");
        std::fs::create_dir(&path).unwrap();
        learn(&mut heat, 2, 300);
        finish(&mut learned, &heat);
        assert!(learned.told);
        std::fs::remove_dir(&path).unwrap();
        learn(&mut heat, 2, 100);
        finish(&mut learned, &heat);
        let (_, heat) = open(&path, "a");
        assert!((heat.tokens() - 400.0).abs() < 10.0, "{}", heat.tokens());
    }

    #[test]
    fn a_broken_file_begins_anew() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("moe-state.ini");
        std::fs::write(&path, "[model a\n").unwrap();
        let (mut learned, mut heat) = open(&path, "a");
        assert!(heat.hottest().is_empty() && folder.path().join("moe-state.ini.broken").exists());
        learn(&mut heat, 0, 50);
        finish(&mut learned, &heat);
        assert_eq!(hottest(&path, "a"), [0]);
    }

    #[test]
    fn two_caches_of_one_model_add_up() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("moe-state.ini");
        let (mut one, mut first) = open(&path, "a");
        let (mut two, mut second) = open(&path, "a");
        learn(&mut first, 0, 200);
        learn(&mut second, 1, 300);
        std::thread::scope(|scope| {
            scope.spawn(|| finish(&mut one, &first));
            scope.spawn(|| finish(&mut two, &second));
        });
        assert_eq!(hottest(&path, "a"), [1, 0]);
        let (_, heat) = open(&path, "a");
        assert!((heat.tokens() - 500.0).abs() < 10.0, "{}", heat.tokens());
    }
}
