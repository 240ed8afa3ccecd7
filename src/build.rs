//! Link flags of the plugin, and its one C++ file. No code is generated here: everything generated is committed and checked for drift.

fn main() {
    println!("cargo:rerun-if-changed=src/build.rs");
    // The host may dlclose us; Rust's thread-locals and our immortal objects make unmapping unsound.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    // Every symbol that is not looked up at run time must be there at link time. (Sanitizer builds resolve theirs late.)
    if std::env::var_os("GGML_MOE_SANITIZE").is_none() {
        println!("cargo:rustc-cdylib-link-arg=-Wl,-z,defs");
    }
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libggml-moe.so");
    // A C++ exception can be caught in C++ only.
    println!("cargo:rerun-if-changed=src/abi/exceptions.cpp");
    cc::Build::new()
        .cpp(true)
        .std("c++17")
        .warnings(true)
        .file("src/abi/exceptions.cpp")
        .compile("ggml_moe_exceptions");
}
