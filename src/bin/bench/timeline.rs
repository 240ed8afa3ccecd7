//! `ggml-moe bench --draw-timeline`, and the timeline of the longest pass of a table of prompts.

use std::path::{Path, PathBuf};

use ggml_moe::bench::timeline::Pass;

use crate::host::{Answer, CommandError, Failed, Usage};

/// Draws the last of the longest passes of a file.
pub(super) fn draw(file: &Path, chart: Option<&Path>) -> Result<Answer, CommandError> {
    let (pass, mut text) = last(file)?;
    let chart = chart.map_or_else(|| file.with_extension("svg"), Path::to_owned);
    std::fs::write(&chart, pass.svg()).map_err(|error| Failed(format!("{}: {error}", chart.display())))?;
    text.push_str(&format!("bench: {}\n", pass.words()));
    Ok(Answer { text, good: true })
}

/// The last of the longest passes, and what is wrong with the file.
pub(super) fn last(file: &Path) -> Result<(Pass, String), CommandError> {
    let text = std::fs::read_to_string(file).map_err(|error| Failed(format!("{}: {error}", file.display())))?;
    let (passes, wrong) = Pass::all(&text);
    let pass = passes.into_iter().max_by_key(|pass| pass.tokens);
    let notes = wrong.iter().map(|why| format!("{}: {why}\n", file.display())).collect();
    let none = || {
        Failed(format!("{}: no pass{}", file.display(), wrong.first().map_or(String::new(), |why| format!(": {why}"))))
    };
    Ok((pass.ok_or_else(none)?, notes))
}

/// Where the plugin writes for a picture.
pub(super) fn lines_file(chart: &Path) -> Result<PathBuf, CommandError> {
    let path = std::path::absolute(chart).map_err(|error| Usage(format!("{}: {error}", chart.display())))?;
    let path = path.with_extension("jsonl");
    if path.display().to_string().contains(';') {
        return Err(Usage(format!("{}: a path with ';' cannot be a key of the plugin", path.display())));
    }
    Ok(path)
}
