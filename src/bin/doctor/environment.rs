//! The doctor's checks of variables that change what programs load and how the plugin is set.

use std::path::{Path, PathBuf};

use ggml_moe::config;

use super::Checks;

/// Looks at the variables; `folder` is that of the host's program, if one was found.
pub(super) fn of_environment(checks: &mut Checks, folder: Option<&Path>, variable: &dyn Fn(&str) -> Option<String>) {
    let named = |name: &str| variable(name).unwrap_or_default();
    let is_host = |path: &Path| folder.is_some_and(|folder| path.canonicalize().ok() == folder.canonicalize().ok());
    let mut others: Vec<String> = Vec::new();
    for path in named("LD_LIBRARY_PATH").split(':').filter(|path| !path.is_empty()).map(PathBuf::from) {
        if has_ggml(&path) && !is_host(&path) {
            others.push(format!("LD_LIBRARY_PATH names {}, which has a ggml of its own", path.display()));
        }
    }
    for path in named("LD_PRELOAD").split([':', ' ']).map(Path::new) {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let is_ggml =
            name.starts_with("libggml") && !name.starts_with("libggml-moe") && !name.starts_with("libggml_moe");
        if is_ggml && !path.parent().is_some_and(is_host) {
            others.push(format!("LD_PRELOAD names {}", path.display()));
        }
    }
    if !others.is_empty() {
        let help = "a program with two ggml libraries, or with those of another build, is refused: unset it";
        checks.warn("libraries", others.join("; "), help);
    }
    let settings = named("GGML_MOE");
    let (_, notices) = config::parse(&settings);
    if notices.is_empty() && !settings.is_empty() {
        checks.ok("settings", format!("GGML_MOE={}", config::shown(&settings)));
    }
    for notice in notices {
        let told = notice.to_string();
        checks.warn(
            "settings",
            told.trim_start_matches("settings: "),
            "`ggml-moe keys` lists the keys; the others of GGML_MOE hold",
        );
    }
}

fn has_ggml(folder: &Path) -> bool {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().into_string().ok()).any(|name| name.starts_with("libggml-base.so"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_libraries_and_settings_are_told() {
        let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        let [host, other] = [folders[0].path(), folders[1].path()];
        for folder in [host, other] {
            std::fs::write(folder.join("libggml-base.so.0"), "").unwrap();
        }
        let of = |pairs: &[(&str, String)]| -> Vec<String> {
            let mut checks = Checks::default();
            let variable = |name: &str| pairs.iter().find(|(known, _)| *known == name).map(|(_, value)| value.clone());
            of_environment(&mut checks, Some(host), &variable);
            checks.0.iter().map(|check| format!("{} {}: {}", check.state.name(), check.what, check.words)).collect()
        };
        assert!(of(&[]).is_empty());
        assert!(of(&[("LD_LIBRARY_PATH", format!("{}:/no/such:", host.display()))]).is_empty());
        let path = |folder: &Path, name: &str| folder.join(name).display().to_string();
        let found = of(&[("LD_LIBRARY_PATH", format!("/usr:{}", other.display()))]);
        assert!(found.len() == 1 && found[0].starts_with("warn libraries: LD_LIBRARY_PATH names "), "{found:?}");
        assert!(of(&[("LD_PRELOAD", path(other, "libggml-moe.so"))]).is_empty(), "the plugin itself");
        assert_eq!(of(&[("LD_PRELOAD", path(other, "libggml-base.so.0"))]).len(), 1);
        assert!(of(&[("LD_PRELOAD", path(host, "libggml-base.so.0"))]).is_empty());
        assert_eq!(of(&[("GGML_MOE", "cache=5".to_owned())]), ["ok settings: GGML_MOE=cache=5"]);
        let wrong = of(&[("GGML_MOE", "cahce=5".to_owned())]);
        assert!(wrong[0].starts_with("warn settings: unknown key \"cahce\""), "{wrong:?}");
    }
}
