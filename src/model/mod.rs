//! What a model file says about its experts, read from its header alone, and where files that llama.cpp fetched lie.
//!
//! Owns: the reading of GGUF headers (`gguf`), the sizes of ggml's types (`types`), the shape of a mixture-of-experts model (`moe`), and the
//! layout of llama.cpp's folders of downloads (`downloads`).
//! Invariants: any bytes are accepted or refused with a reason; memory grows with what was read, never with what a header claims.
//! Threads: none. Does not: read weights, or know a device.

pub mod downloads;
pub mod gguf;
pub mod moe;
pub mod types;
