//! Our picture of ggml's binary interface is the real one, for each layout.
//!
//! Three programs print every size, offset and number: C over the headers of a release, C over ours (both from
//! `conformance/lists/`), and Rust over the bindings (made here from the text of the bindings, so that nothing in them
//! can be missing from the lists). The three outputs must be equal. A fourth file proves that types agree too.
//! The headers of an older layout hold only what it has otherwise; what it shares with `api 3` is compared with its release, too.
#![expect(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

#[path = "conformance/toolchain.rs"]
mod toolchain;

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use toolchain::{compiler, matrix, root, run, scratch, stock};

/// What one of our headers says, and where the truth is.
struct Claim {
    /// For reports and folders.
    name: &'static str,
    /// The folder in `ggml-headers/`.
    headers: &'static str,
    /// Which of `conformance/lists/` are compared.
    lists: &'static [&'static str],
    /// The ggml folder of the release to compare with.
    release: PathBuf,
    /// Functions that this release lacks; `None` if the header declares no functions.
    lacks: Option<&'static [&'static str]>,
}

const SHARED: &[&str] = &["shared", "since-2026"];
const ROWS: &[&str] = &["ggml_backend_tensor_set_2d", "ggml_backend_tensor_get_2d"];

/// Everything of `api 3`, in the main host.
fn api3() -> Claim {
    Claim {
        name: "conformance-api3",
        headers: "api3",
        lists: &["shared", "since-2026", "api3", "numbers"],
        release: stock("source").join("ggml"),
        lacks: Some(&[]),
    }
}

/// The sources of an older layout.
fn release(layout: &str) -> PathBuf {
    let lines = matrix(&["list-layouts"]);
    let [name, folder] = lines.iter().find(|line| line[0] == layout).expect("the matrix has the layout").as_slice()
    else {
        panic!("not a layout: {lines:?}")
    };
    assert_eq!(name, layout);
    folder.into()
}

/// For each older layout: what it declares itself, and what it shares with newer ones.
fn older() -> [(Claim, Vec<Claim>); 2] {
    let (api2, api2_2025) = (release("api2"), release("api2-2025"));
    let claim =
        |name, headers, lists, release: &Path, lacks| Claim { name, headers, lists, release: release.into(), lacks };
    [
        (
            claim("conformance-api2", "api2", &["api2", "api2-types"], &api2, None),
            vec![claim("conformance-api2-shared", "api3", SHARED, &api2, Some(&[]))],
        ),
        (
            claim("conformance-api2-2025", "api2-2025", &["api2-2025"], &api2_2025, None),
            vec![
                claim("conformance-api2-2025-types", "api2", &["api2-types"], &api2_2025, None),
                claim("conformance-api2-2025-shared", "api3", &SHARED[..1], &api2_2025, Some(ROWS)),
            ],
        ),
    ]
}

/// The lines that a program prints, without order.
fn lines(program: &Path) -> BTreeSet<String> {
    let output = run(&mut Command::new(program));
    String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect()
}

/// A folder for what is built of a claim, with its list in it. The tests run side by side, so `purpose` keeps them apart.
fn folder(claim: &Claim, purpose: &str) -> PathBuf {
    let folder = scratch(&format!("{}-{purpose}", claim.name));
    let lists = root().join("tests/conformance/lists");
    let text: String = claim.lists.iter().map(|name| format!("#include \"{}/{name}.h\"\n", lists.display())).collect();
    std::fs::write(folder.join("list.inc"), text).unwrap();
    folder
}

/// Builds `dump.c` and returns what it prints.
fn dump(claim: &Claim, name: &str, flags: &[&str]) -> BTreeSet<String> {
    let folder = folder(claim, "dump");
    let program = folder.join(name);
    let mut command = compiler(&claim.release);
    command.args(flags).arg("-I").arg(&folder).arg("-I").arg(root().join("ggml-headers").join(claim.headers));
    run(command.arg(root().join("tests/conformance/dump.c")).arg("-o").arg(&program));
    lines(&program)
}

/// A Rust program that prints, in the form of `dump.c`, every item of the bindings.
fn rust_dump(path: &Path) -> String {
    let bindings = std::fs::read_to_string(path).unwrap();
    let mut body = String::new();
    let mut structure = "";
    for line in bindings.lines() {
        let word = |text: &str| text.split([':', ' ']).next().unwrap_or_default().to_owned();
        if let Some(name) = line.strip_prefix("pub const ").map(word) {
            writeln!(body, "    println!(\"const {name} {{}}\", api::{name});").unwrap();
        } else if line.starts_with("pub type fn_") {
            // Imported functions have no size or number; their types are compared below.
        } else if let Some(name) = line.strip_prefix("pub type ").map(word) {
            writeln!(body, "    println!(\"type {name} {{}}\", size_of::<api::{name}>());").unwrap();
        } else if let Some(name) = line.strip_prefix("pub struct ") {
            structure = name.trim_end_matches(" {");
        } else if line.starts_with("    _unused") {
            structure = ""; // an opaque type: it has no size of its own
        } else if let Some(field) = line.strip_prefix("    pub ").map(word) {
            assert!(!structure.is_empty(), "a field outside a struct: {line}");
            // bindgen puts an underscore behind the keywords of Rust: type_, async_
            let upstream = field.trim_end_matches('_');
            let offset = format!("std::mem::offset_of!(api::{structure}, {field})");
            let size = format!("size(|s: &api::{structure}| &s.{field})");
            writeln!(body, "    println!(\"field {structure}.{upstream} at {{}} size {{}}\", {offset}, {size});")
                .unwrap();
        } else if line == "}" && !structure.is_empty() {
            let size = format!("size_of::<api::{structure}>(), align_of::<api::{structure}>()");
            writeln!(body, "    println!(\"struct {structure} {{}} align {{}}\", {size});").unwrap();
            structure = "";
        }
    }
    format!(
        "#[allow(warnings)]\n#[path = {:?}]\nmod api;\n\
         fn size<S, T>(_: impl Fn(&S) -> &T) -> usize {{ size_of::<T>() }}\n\
         fn main() {{\n{body}}}\n",
        path
    )
}

/// Fails with the lines that only one side has.
fn assert_equal(left_name: &str, left: &BTreeSet<String>, right_name: &str, right: &BTreeSet<String>) {
    let mut report = String::new();
    for line in left.symmetric_difference(right) {
        let side = if left.contains(line) { left_name } else { right_name };
        writeln!(report, "  only in {side}: {line}").unwrap();
    }
    assert!(report.is_empty(), "{left_name} and {right_name} differ:\n{report}");
}

/// Compares a release with our header, and returns what the header says.
fn agrees_with_release(claim: &Claim) -> BTreeSet<String> {
    let ours = dump(claim, "ours", &[]);
    assert_equal(&format!("{}: the release", claim.name), &dump(claim, "release", &["-DREAL"]), "our header", &ours);
    ours
}

/// Compares the bindings with what the header says: neither may have an item more.
fn agrees_with_bindings(claim: &Claim, ours: &BTreeSet<String>) {
    let folder = folder(claim, "dump");
    let (source, program) = (folder.join("bindings.rs"), folder.join("bindings"));
    let bindings = root().join(format!("src/abi/gen/{}.rs", claim.headers.replace('-', "_")));
    std::fs::write(&source, rust_dump(&bindings)).unwrap();
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    run(Command::new(rustc).args(["--edition", "2024", "-o"]).arg(&program).arg(&source));
    assert_equal(&format!("{}: the lists", claim.name), ours, "the Rust bindings", &lines(&program));
}

#[test]
fn sizes_offsets_and_numbers_agree() {
    let ours = agrees_with_release(&api3());
    assert!(ours.len() > 300, "the lists are short: {} lines", ours.len());
    agrees_with_bindings(&api3(), &ours);
}

/// The item of a line: its kind and name, without numbers.
fn item(line: &str) -> String {
    line.split(' ').take(2).collect::<Vec<_>>().join(" ")
}

#[test]
fn older_layouts_agree() {
    let newest: BTreeSet<String> =
        dump(&Claim { name: "conformance-newest", ..api3() }, "ours", &[]).iter().map(|line| item(line)).collect();
    for (own, shared) in older() {
        let declared = agrees_with_release(&own);
        agrees_with_bindings(&own, &declared);
        let shared: BTreeSet<String> = shared.iter().flat_map(agrees_with_release).collect();
        assert!(shared.len() > 150, "the shared lists are short: {} lines", shared.len());
        // Whatever api 3 declares is compared with this release, or is known to be otherwise there.
        let compared: BTreeSet<String> = declared.iter().chain(&shared).map(|line| item(line)).collect();
        let left: Vec<&String> = newest.difference(&compared).filter(|item| !differs(item)).collect();
        assert!(left.is_empty(), "{}: not compared: {left:?}", own.name);
    }
}

/// What older releases lack or number otherwise.
fn differs(item: &str) -> bool {
    const LACKING: [&str; 15] = [
        "const GGML_TYPE_COUNT",
        "const GGML_TYPE_Q1_0",
        "const GGML_TYPE_Q2_0",
        "const GGML_BACKEND_DEVICE_TYPE_META",
        "struct ggml_cgraph",
        "field ggml_cgraph.uid",
        "struct ggml_backend_dev_caps",
        "field ggml_backend_dev_caps.mmap_support",
        "field ggml_backend_dev_props.caps",
        "field ggml_backend_buffer_type_i.alloc_buffer_n",
        "field ggml_backend_buffer_type_i.get_alloc_size_n",
        "field ggml_backend_buffer_i.set_tensor_2d",
        "field ggml_backend_buffer_i.get_tensor_2d",
        "field ggml_backend_i.set_tensor_2d_async",
        "field ggml_backend_i.get_tensor_2d_async",
    ];
    LACKING.contains(&item) || item.starts_with("const GGML_OP_") || item.contains("ggml_backend_graph_optimize_params")
}

/// Our typedefs as they are, and our structs under the name `mirror_TAG`.
fn declarations(header: &str) -> String {
    let mut out = String::new();
    let mut inside: Option<&str> = None; // the line that ends the declaration being copied
    for line in header.lines() {
        let start = line.starts_with("typedef ") || (line.starts_with("struct ") && line.ends_with('{'));
        if start {
            inside = Some(if line.starts_with("typedef ") { ";" } else { "};" });
            out.push_str(&line.replacen("struct ", "struct mirror_", usize::from(line.ends_with('{'))));
        } else if inside.is_some() {
            out.push_str(line);
        } else {
            continue;
        }
        out.push('\n');
        if inside.is_some_and(|end| if end == ";" { line.ends_with(end) } else { line == end }) {
            inside = None;
        }
    }
    out
}

/// Compiles each type that our header declares against the one of the release.
fn types_agree(claim: &Claim) {
    let headers = root().join("ggml-headers").join(claim.headers);
    let text = declarations(&std::fs::read_to_string(headers.join("ggml-abi.h")).unwrap());
    assert!(text.contains("struct mirror_ggml_backend_i {"), "the header was not understood:\n{text}");
    let folder = folder(claim, "types");
    std::fs::write(folder.join("declarations.inc"), text).unwrap();
    let mut command = compiler(&claim.release);
    command.args(["-fsyntax-only", "-Werror", "-I"]).arg(&folder).arg("-I").arg(&headers);
    let mut functions = String::new();
    if let Some(lacks) = claim.lacks {
        let imports = std::fs::read_to_string(headers.join("ggml-imports.h")).unwrap();
        let all: Vec<&str> = imports.split("(*fn_").skip(1).filter_map(|rest| rest.split(')').next()).collect();
        assert!(all.len() > 20, "the header was not understood: {all:?}");
        assert!(lacks.iter().all(|name| all.contains(name)), "functions that are not declared: {lacks:?}");
        functions =
            all.iter().filter(|name| !lacks.contains(name)).map(|name| format!("ABI_FUNCTION({name})\n")).collect();
        command.arg("-DIMPORTS");
    }
    std::fs::write(folder.join("functions.inc"), functions).unwrap();
    run(command.arg(root().join("tests/conformance/signatures.c")));
}

#[test]
fn types_and_signatures_agree() {
    types_agree(&api3());
    for (own, shared) in older() {
        types_agree(&own);
        shared.iter().for_each(types_agree);
    }
}
