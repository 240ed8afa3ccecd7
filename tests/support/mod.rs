//! What the tests against stock hosts share: where the stock programs and the plugin are, running a child under a time
//! limit, a small HTTP client, a running `llama-server`, the GGUF header, small models made for one test, and models that are wrong on
//! purpose.
//!
//! A helper that cannot do its work panics with the end of the child's output: in a test that is the report.

pub mod derived;
pub mod doctored;
pub mod generated;
pub mod gguf;
pub mod http;
pub mod process;
pub mod server;
pub mod stock;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// The folder of this package.
pub fn package() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// A file of `tests/fixtures`.
pub fn fixture(name: &str) -> PathBuf {
    package().join("tests/fixtures").join(name)
}

/// The small trained mixture-of-experts model that every gate uses.
pub fn fixture_model() -> PathBuf {
    fixture("tiny-docs-moe.Q4_K_M.gguf")
}

/// A folder under the target folder that lives on between runs, for what is slow to make again.
pub fn kept_folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::create_dir_all(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    folder
}

/// The right to make a file of a kept folder: tests that run side by side want the same ones. Each kind of file has a lock of its own.
pub fn making(kind: &'static Mutex<()>) -> MutexGuard<'static, ()> {
    // A test that failed while it made one leaves a file that has not got its name.
    kind.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Results that several tests compare with, each computed once a run, also when two tests ask at the same time.
pub struct Computed<V>(Mutex<BTreeMap<String, Arc<OnceLock<V>>>>);

impl<V: Clone> Computed<V> {
    /// Nothing yet.
    pub const fn new() -> Self {
        Self(Mutex::new(BTreeMap::new()))
    }

    /// The result of this name; computed again if the one who began has panicked.
    pub fn get(&self, name: String, compute: impl FnOnce() -> V) -> V {
        let entry = Arc::clone(self.0.lock().expect("nothing panics here").entry(name).or_default());
        entry.get_or_init(compute).clone()
    }
}

/// A path as text; every path of the tests is UTF-8.
pub fn text(path: &Path) -> &str {
    path.to_str().unwrap_or_else(|| panic!("{} is not UTF-8", path.display()))
}
