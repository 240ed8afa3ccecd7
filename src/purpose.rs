//! What a tensor is for, told by its name and its place.
//!
//! Owns: the names by which llama.cpp's weights and caches are known.
//! Invariants: any name is accepted; one that tells nothing is an intermediate result.
//! Threads: none; everything here is a pure function of its input.
//! Does not: decide where a tensor lies (the host and `Device::supports_op` do).

/// Which of a device's two buffer types.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Dense weights, KV, compute.
    Default,
    /// Expert weights, in host memory.
    Experts,
}

/// What a tensor is for, told by its name and its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// An expert weight.
    Expert,
    /// Any other weight.
    Dense,
    /// Part of a KV cache or of a recurrent state.
    Cache,
    /// Intermediate results, and tensors without a telling name.
    Compute,
}

impl Purpose {
    /// llama.cpp's names: weights end in `.weight`, `.bias`, `.scale` and the like under `blk.` or by themselves, caches start
    /// with `cache_`.
    pub fn of(name: &str, role: Role) -> Self {
        let weight = [".weight", ".bias", ".scale"].iter().any(|suffix| name.ends_with(suffix));
        match role {
            Role::Experts => Self::Expert,
            Role::Default if name.starts_with("cache_") => Self::Cache,
            Role::Default if weight || name.starts_with("blk.") => Self::Dense,
            Role::Default => Self::Compute,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn purpose_by_name_and_place() {
        for (name, purpose) in [
            ("blk.3.attn_q.weight", Purpose::Dense),
            ("output.weight", Purpose::Dense),
            ("blk.0.ffn_gate_inp.bias", Purpose::Dense),
            ("cache_k_l12", Purpose::Cache),
            ("cache_s_l0", Purpose::Cache),
            ("ffn_moe_logits-3", Purpose::Compute),
            ("", Purpose::Compute),
        ] {
            assert_eq!(Purpose::of(name, Role::Default), purpose, "{name}");
        }
        assert_eq!(Purpose::of("blk.3.ffn_gate_exps.weight", Role::Experts), Purpose::Expert);
    }
}
