//! What `ggml-moe bench` writes: the report, its picture, and the file of kept runs.

use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::path::{Path, PathBuf};

use ggml_moe::bench::report::Report;
use ggml_moe::bench::runs;

use super::BenchArguments;
use crate::host::{Answer, CommandError, Failed, Usage};

/// Keeps a report. What was measured is shown also when it cannot be kept: what to say then, and whether it was.
pub(super) fn answer(arguments: &BenchArguments, report: &Report) -> (String, bool) {
    match keep(arguments, report) {
        Ok(()) => (String::new(), true),
        Err(Usage(why) | Failed(why)) => (format!("bench: not kept: {why}\n"), false),
    }
}

pub(super) fn keep(arguments: &BenchArguments, report: &Report) -> Result<(), CommandError> {
    let failed = |path: &Path, error: std::io::Error| Failed(format!("{}: {error}", path.display()));
    if let Some(path) = &arguments.json {
        std::fs::write(path, format!("{:#}\n", report.json())).map_err(|error| failed(path, error))?;
    }
    if let Some(path) = &arguments.chart {
        std::fs::write(path, report.svg()).map_err(|error| failed(path, error))?;
    }
    let path = runs_file(arguments)?;
    if path.as_os_str() == "none" {
        return Ok(());
    }
    let write = || -> std::io::Result<()> {
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder)?;
        }
        let mut file: File = OpenOptions::new().create(true).append(true).open(&path)?;
        file.write_all(runs::line(report).as_bytes())
    };
    write().map_err(|error| failed(&path, error))
}

pub(super) fn list(arguments: &BenchArguments) -> Result<Answer, CommandError> {
    let path = runs_file(arguments)?;
    let text = match std::fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return Ok(Answer { text: format!("bench: no runs are kept in {}\n", path.display()), good: true });
        }
        Err(error) => return Err(Failed(format!("{}: {error}", path.display()))),
    };
    let (mut table, broken) = runs::table(&text);
    if broken > 0 {
        table.push_str(&format!("{broken} lines of {} are no runs\n", path.display()));
    }
    Ok(Answer { text: table, good: true })
}

/// Where runs are kept.
fn runs_file(arguments: &BenchArguments) -> Result<PathBuf, CommandError> {
    if let Some(path) = &arguments.runs {
        return Ok(path.clone());
    }
    let folder = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let cache = folder("GGML_MOE_CACHE")
        .or_else(|| folder("XDG_CACHE_HOME").map(|folder| folder.join("ggml-moe")))
        .or_else(|| folder("HOME").map(|folder| folder.join(".cache/ggml-moe")));
    cache
        .map(|folder| folder.join("bench-runs.jsonl"))
        .ok_or_else(|| Usage("no folder for kept runs (HOME is not set); name a file with --runs".to_owned()))
}
