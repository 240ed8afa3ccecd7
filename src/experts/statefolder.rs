//! Where the state file is.
//!
//! Owns: the rule: `state-file`, or `moe-state.ini` in the folder in which llama.cpp keeps what it can fetch or make again.
//! Threads: none; a pure function of its input. Does not: read the environment, open files, or make folders.

use std::ffi::OsString;
use std::path::PathBuf;

use crate::config::StateFile;
use crate::model::downloads::plain_folder;

/// The name of the file.
pub const FILE_NAME: &str = "moe-state.ini";

/// The path of the state file; `None` if there is none (`state-file=off`), or no home folder. `variable` reads the environment.
pub fn path(setting: Option<&StateFile>, variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    match setting {
        Some(StateFile::Off) => return None,
        Some(StateFile::At(path)) => return Some(path.clone()),
        None => {}
    }
    Some(plain_folder(&variable)?.join(FILE_NAME))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn in_folder(variables: &[(&str, &str)]) -> Option<PathBuf> {
        path(None, |name| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value.into()))
    }

    #[test]
    fn the_folder_is_that_of_llama_cpp() {
        let all = [("LLAMA_CACHE", "/a"), ("XDG_CACHE_HOME", "/b"), ("HOME", "/c")];
        assert_eq!(in_folder(&all), Some("/a/moe-state.ini".into()));
        assert_eq!(in_folder(&all[1..]), Some("/b/llama.cpp/moe-state.ini".into()));
        assert_eq!(in_folder(&all[2..]), Some("/c/.cache/llama.cpp/moe-state.ini".into()));
        assert_eq!(in_folder(&[("LLAMA_CACHE", ""), ("HOME", "/c")]), Some("/c/.cache/llama.cpp/moe-state.ini".into()));
        assert_eq!(in_folder(&[]), None);
    }

    #[test]
    fn a_path_that_was_given_holds() {
        let given = StateFile::At("x.ini".into());
        assert_eq!(path(Some(&given), |_| Some("/a".into())), Some("x.ini".into()));
        assert_eq!(path(Some(&StateFile::Off), |_| Some("/a".into())), None);
    }
}
