//! Our picture of ggml's binary interface is the real one.
//!
//! Three programs print every size, offset and number: C over ggml's own headers, C over ours (both from
//! `conformance/list.h`), and Rust over the bindings (made here from the text of the bindings, so that nothing in them
//! can be missing from the list). The three outputs must be equal. A fourth file proves that types agree too.
#![expect(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

#[path = "conformance/toolchain.rs"]
mod toolchain;

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;
use toolchain::{compiler, root, run, scratch, stock};

const LAYOUT: &str = "api3";

/// The lines that a program prints, without order.
fn lines(program: &Path) -> BTreeSet<String> {
    let output = run(&mut Command::new(program));
    String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect()
}

/// Builds `dump.c` and returns what it prints.
fn dump(name: &str, flags: &[&str]) -> BTreeSet<String> {
    let program = scratch("conformance").join(name);
    let mut command = compiler(&stock("source"));
    command.args(flags).arg("-I").arg(root().join("ggml-headers").join(LAYOUT));
    run(command.arg(root().join("tests/conformance/dump.c")).arg("-o").arg(&program));
    lines(&program)
}

/// A Rust program that prints, in the form of `dump.c`, every item of the bindings.
fn rust_dump(bindings: &str) -> String {
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
        root().join(format!("src/abi/gen/{LAYOUT}.rs"))
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

#[test]
fn sizes_offsets_and_numbers_agree() {
    let upstream = dump("upstream", &["-DREAL"]);
    let ours = dump("ours", &[]);
    assert!(ours.len() > 300, "the list is short: {} lines", ours.len());
    assert_equal("ggml's headers", &upstream, "our headers", &ours);

    let bindings = std::fs::read_to_string(root().join(format!("src/abi/gen/{LAYOUT}.rs"))).unwrap();
    let folder = scratch("conformance");
    let (source, program) = (folder.join("bindings.rs"), folder.join("bindings"));
    std::fs::write(&source, rust_dump(&bindings)).unwrap();
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    run(Command::new(rustc).args(["--edition", "2024", "-o"]).arg(&program).arg(&source));
    assert_equal("the C list", &ours, "the Rust bindings", &lines(&program));
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

#[test]
fn types_and_signatures_agree() {
    let headers = root().join("ggml-headers").join(LAYOUT);
    let text = declarations(&std::fs::read_to_string(headers.join("ggml-abi.h")).unwrap());
    assert!(text.contains("struct mirror_ggml_tensor {"), "the header was not understood:\n{text}");
    let folder = scratch("conformance");
    std::fs::write(folder.join("declarations.inc"), text).unwrap();
    let imports = std::fs::read_to_string(headers.join("ggml-imports.h")).unwrap();
    let functions: Vec<&str> =
        imports.split("(*fn_").skip(1).map(|rest| rest.split(')').next().unwrap_or_default()).collect();
    assert!(functions.len() > 20, "the header was not understood: {functions:?}");
    let lines: String = functions.iter().map(|name| format!("ABI_FUNCTION({name})\n")).collect();
    std::fs::write(folder.join("functions.inc"), lines).unwrap();
    let mut command = compiler(&stock("source"));
    command.args(["-fsyntax-only", "-Werror", "-I"]).arg(&folder).arg("-I").arg(headers);
    run(command.arg(root().join("tests/conformance/signatures.c")));
}
