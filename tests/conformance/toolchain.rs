//! The tools that the tests over the C interface call: the stock sources, the C compiler, and a folder for their output.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// The root of the repository.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// A folder of this name for built C programs, beside Cargo's own output.
pub fn scratch(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::create_dir_all(&folder).expect("the target folder is writable");
    folder
}

/// What `tests/stock/stock.sh <word>` prints: a folder of the stock host.
pub fn stock(word: &str) -> PathBuf {
    let output = Command::new(root().join("tests/stock/stock.sh")).arg(word).output().expect("bash runs");
    assert!(
        output.status.success(),
        "tests/stock/stock.sh {word} failed, so there is no stock llama.cpp to compare with:\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
    PathBuf::from(String::from_utf8_lossy(&output.stdout).trim())
}

/// The C compiler (`CC`, or `cc`) with the include folders of a ggml folder.
pub fn compiler(ggml: &Path) -> Command {
    let mut command = Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()));
    command.args(["-std=gnu11", "-Wall", "-Wextra"]);
    command.arg("-isystem").arg(ggml.join("include")).arg("-isystem").arg(ggml.join("src"));
    command
}

/// The lines of what `tests/stock/matrix.sh <words>` prints, in words.
pub fn matrix(words: &[&str]) -> Vec<Vec<String>> {
    let output = Command::new(root().join("tests/stock/matrix.sh")).args(words).output().expect("bash runs");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "matrix.sh {words:?}: {}", String::from_utf8_lossy(&output.stderr));
    text.lines().map(|line| line.split(' ').map(str::to_owned).collect()).collect()
}

/// Runs a command that must succeed; its output is in the panic when it does not.
pub fn run(command: &mut Command) -> Output {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(
        output.status.success(),
        "{command:?}\nended with {}\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    output
}
