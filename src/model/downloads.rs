//! Models that llama.cpp fetches itself (`-hf`, `-mu`, `-dr`), and where it keeps them.
//!
//! Owns: the layout of its folders of downloads (b10434 and b11434), and the choice of a file of a repository by its quantization.
//! Invariants: any names and any content of folders are accepted. Threads: any; nothing is kept.
//! Does not: fetch anything, or know what lies in a repository beside what was fetched of it. A newer file there is not seen, and neither is a
//! repository that holds presets alone.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Reads the environment.
pub type Variable<'a> = &'a dyn Fn(&str) -> Option<OsString>;

/// What is to be fetched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Download {
    /// A file of a repository: USER/REPOSITORY, with a quantization behind a colon.
    Repository(String),
    /// A file by its address.
    Address(String),
    /// An image of another registry.
    Image(String),
}

impl Download {
    /// As the user named it.
    pub fn name(&self) -> &str {
        match self {
            Self::Repository(name) | Self::Address(name) | Self::Image(name) => name,
        }
    }

    /// The file, if it was fetched before. `wanted` is the name of a file within the repository, `place` where a file that is fetched by its
    /// address shall lie.
    pub fn file(&self, wanted: Option<&str>, place: Option<&Path>, variable: Variable<'_>) -> Option<PathBuf> {
        match self {
            Self::Repository(name) => {
                let (repository, tag) = name.split_once(':').unwrap_or((name, ""));
                of_repository(&hub_folder(variable)?, repository, tag, wanted)
            }
            Self::Address(address) => {
                let name = address.split(['#', '?']).next()?.rsplit('/').next().filter(|name| !name.is_empty())?;
                let path = match place {
                    Some(place) => place.to_owned(),
                    None => plain_folder(variable)?.join(name),
                };
                path.is_file().then_some(path)
            }
            Self::Image(_) => None,
        }
    }
}

fn folder(variable: Variable<'_>, name: &str) -> Option<PathBuf> {
    variable(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}

/// Where what was fetched by its address lies, beside other things that can be made again.
pub fn plain_folder(variable: Variable<'_>) -> Option<PathBuf> {
    folder(variable, "LLAMA_CACHE").or_else(|| {
        let caches = folder(variable, "XDG_CACHE_HOME").or_else(|| Some(folder(variable, "HOME")?.join(".cache")))?;
        Some(caches.join("llama.cpp"))
    })
}

/// Where repositories lie, shared with other programs that fetch from the same hub.
fn hub_folder(variable: Variable<'_>) -> Option<PathBuf> {
    let own = ["LLAMA_CACHE", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"];
    own.into_iter()
        .find_map(|name| folder(variable, name))
        .or_else(|| Some(folder(variable, "HF_HOME")?.join("hub")))
        .or_else(|| Some(folder(variable, "XDG_CACHE_HOME")?.join("huggingface/hub")))
        .or_else(|| Some(folder(variable, "HOME")?.join(".cache/huggingface/hub")))
}

fn of_repository(hub: &Path, repository: &str, tag: &str, wanted: Option<&str>) -> Option<PathBuf> {
    // A name and nothing that leads out of the folder.
    let plain = |word: &str| !word.is_empty() && !word.starts_with('.') && !word.contains('/');
    let (user, name) = repository.split_once('/').filter(|(user, name)| plain(user) && plain(name))?;
    let place = hub.join(format!("models--{user}--{name}"));
    let snapshot = place.join("snapshots").join(commit(&place.join("refs"))?);
    let mut names = Vec::new();
    list(&snapshot, "", 4, &mut names);
    names.sort();
    let found = match wanted {
        Some(wanted) => names.iter().find(|name| *name == wanted),
        None if tag.is_empty() => ["Q4_K_M", "Q8_0", ""].into_iter().find_map(|tag| best(&names, tag)),
        None => best(&names, tag),
    };
    let path = snapshot.join(found?);
    path.is_file().then_some(path)
}

/// The commit of the main branch, or of any other.
fn commit(refs: &Path) -> Option<String> {
    let read = |path: PathBuf| {
        let text = std::fs::read_to_string(path).ok()?;
        let commit = text.lines().next()?.to_owned();
        (commit.len() == 40 && commit.bytes().all(|sign| sign.is_ascii_hexdigit())).then_some(commit)
    };
    read(refs.join("main")).or_else(|| std::fs::read_dir(refs).ok()?.flatten().find_map(|entry| read(entry.path())))
}

/// Names of the files below a folder, with those of folders between.
fn list(folder: &Path, before: &str, depth: u32, names: &mut Vec<String>) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let Ok(name) = entry.file_name().into_string() else { continue };
        let name = format!("{before}{name}");
        if entry.path().is_file() {
            names.push(name);
        } else if depth > 0 && entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            list(&entry.path(), &format!("{name}/"), depth - 1, names);
        }
    }
}

/// The first model of this quantization; of a split one, its first file.
fn best<'a>(names: &'a [String], tag: &str) -> Option<&'a String> {
    let tag = tag.to_ascii_lowercase();
    let marked = |name: &str| {
        let name = name.to_ascii_lowercase();
        tag.is_empty() || ["-", "."].iter().any(|end| name.contains(&format!("{tag}{end}")))
    };
    names.iter().find(|name| is_model(name) && marked(name))
}

/// Whether it is a model of its own: no image encoder, importance matrix or draft, and no later part of one.
fn is_model(name: &str) -> bool {
    const OTHERS: [&str; 6] = ["mmproj", "imatrix", "mtp-", "eagle3-", "dflash-", "dspark-"];
    let file = name.rsplit('/').next().unwrap_or(name);
    let Some(stem) = file.strip_suffix(".gguf") else { return false };
    let later = stem
        .rsplit_once("-of-")
        .and_then(|(before, _)| before.rsplit_once('-'))
        .is_some_and(|(_, number)| number.len() == 5 && number.parse::<u32>().is_ok_and(|number| number != 1));
    !later && !OTHERS.iter().any(|other| file.contains(other))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

    fn hub(files: &[&str]) -> tempfile::TempDir {
        let hub = tempfile::tempdir().unwrap();
        let place = hub.path().join("models--them--their.model");
        fs::create_dir_all(place.join("refs")).unwrap();
        fs::write(place.join("refs/main"), COMMIT).unwrap();
        for file in files {
            let path = place.join("snapshots").join(COMMIT).join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "").unwrap();
        }
        hub
    }

    fn found(hub: &Path, name: &str, wanted: Option<&str>) -> Option<String> {
        let variable = |name: &str| (name == "LLAMA_CACHE").then(|| hub.as_os_str().to_owned());
        let path = Download::Repository(name.to_owned()).file(wanted, None, &variable)?;
        let snapshot = hub.join("models--them--their.model/snapshots").join(COMMIT);
        Some(path.strip_prefix(snapshot).unwrap().to_str().unwrap().to_owned())
    }

    #[test]
    fn a_file_of_a_repository_is_found_by_its_quantization() {
        let some = [
            "m-Q8_0.gguf",
            "m-IQ2_M.gguf",
            "mmproj-Q4_K_M.gguf",
            "README.md",
            "UD/m-Q3_K-00001-of-00002.gguf",
            "UD/m-Q3_K-00002-of-00002.gguf",
        ];
        let hub = hub(&some);
        let of = |name: &str| found(hub.path(), name, None);
        assert_eq!(of("them/their.model").as_deref(), Some("m-Q8_0.gguf"), "the host's second choice");
        assert_eq!(of("them/their.model:iq2_m").as_deref(), Some("m-IQ2_M.gguf"));
        assert_eq!(of("them/their.model:Q3_K").as_deref(), Some("UD/m-Q3_K-00001-of-00002.gguf"));
        assert_eq!(of("them/their.model:Q4_K_M"), None, "an image encoder is no model");
        assert_eq!(found(hub.path(), "them/their.model", Some("m-IQ2_M.gguf")).as_deref(), Some("m-IQ2_M.gguf"));
        assert_eq!(found(hub.path(), "them/their.model", Some("other.gguf")), None);
        for strange in ["them", "them/other", "../x", "them/..", "/", "", ":", "a/b/c", "them/their.model:"] {
            assert_eq!(of(strange).is_some(), strange.ends_with("model:"), "{strange}");
        }
        fs::write(hub.path().join("models--them--their.model/refs/main"), "../../..").unwrap();
        assert_eq!(of("them/their.model"), None, "no commit");
    }

    #[test]
    fn without_a_known_quantization_the_first_is_taken() {
        let hub = hub(&["b.gguf", "a-00002-of-00002.gguf", "imatrix.gguf"]);
        assert_eq!(found(hub.path(), "them/their.model", None).as_deref(), Some("b.gguf"));
    }

    #[test]
    fn folders_are_the_host_s() {
        let all = [
            ("LLAMA_CACHE", "/a"),
            ("HF_HUB_CACHE", "/b"),
            ("HUGGINGFACE_HUB_CACHE", "/c"),
            ("HF_HOME", "/d"),
            ("XDG_CACHE_HOME", "/e"),
            ("HOME", "/f"),
        ];
        let folders = ["/a", "/b", "/c", "/d/hub", "/e/huggingface/hub", "/f/.cache/huggingface/hub"];
        for (number, wanted) in folders.into_iter().enumerate() {
            let variable = |name: &str| Some(all[number..].iter().find(|(known, _)| *known == name)?.1.into());
            assert_eq!(hub_folder(&variable), Some(wanted.into()));
        }
        assert_eq!(hub_folder(&|_| None), None);
    }

    #[test]
    fn a_file_by_its_address_lies_under_its_name() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("m.gguf"), "").unwrap();
        let variable = |name: &str| (name == "LLAMA_CACHE").then(|| folder.path().as_os_str().to_owned());
        let of =
            |address: &str, place: Option<&Path>| Download::Address(address.to_owned()).file(None, place, &variable);
        assert_eq!(of("http://x/y/m.gguf?download=true#z", None), Some(folder.path().join("m.gguf")));
        assert_eq!(of("http://x/y/n.gguf", None), None);
        assert_eq!(of("http://x/y/n.gguf", Some(&folder.path().join("m.gguf"))), Some(folder.path().join("m.gguf")));
        assert_eq!(of("http://x/y/m.gguf", Some(&folder.path().join("n.gguf"))), None);
        assert_eq!(of("", None), None);
        assert_eq!(Download::Image("m.gguf".to_owned()).file(None, None, &variable), None);
    }
}
