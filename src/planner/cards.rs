//! What cards can do, by their names.
//!
//! Owns: the table. Memory rates are those of the data sheets. How fast a card computes prompts was measured here for the H200 only; for the
//! others it is a part of what their data sheets say of half precision, so prompts are predicted for them no better than to a factor of 1.5.
//! Threads: none. Does not: ask a card.

/// What a card can do.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ability {
    /// 10^9 bytes per second of its memory.
    pub memory_gbs: f64,
    /// 10^12 operations per second that prompts of quantized models reach.
    pub prompt_tflops: f64,
    /// Whether the name was known.
    pub known: bool,
}

/// A part of the name, memory, prompts. The first that is found counts, so longer names come first.
const CARDS: [(&str, f64, f64); 40] = [
    ("GH200", 4000.0, 72.0),
    ("H200", 4800.0, 75.0),
    ("H100", 3350.0, 70.0),
    ("B200", 8000.0, 100.0),
    ("A100", 1940.0, 45.0),
    ("A6000", 768.0, 20.0),
    ("A40", 696.0, 20.0),
    ("A10", 600.0, 16.0),
    ("L40", 864.0, 40.0),
    ("L4", 300.0, 14.0),
    ("RTX PRO 6000", 1790.0, 60.0),
    ("RTX PRO 4500", 896.0, 30.0),
    ("RTX 6000 Ada", 960.0, 40.0),
    ("RTX 5090", 1790.0, 55.0),
    ("RTX 5080", 960.0, 32.0),
    ("RTX 5070 Ti", 896.0, 26.0),
    ("RTX 5070", 672.0, 19.0),
    ("RTX 5060", 448.0, 14.0),
    ("RTX 4090", 1008.0, 40.0),
    ("RTX 4080", 720.0, 26.0),
    ("RTX 4070 Ti", 504.0, 21.0),
    ("RTX 4070", 504.0, 16.0),
    ("RTX 4060", 272.0, 9.0),
    ("RTX 3090", 936.0, 16.0),
    ("RTX 3080", 760.0, 14.0),
    ("RTX 3070", 448.0, 10.0),
    ("RTX 3060", 360.0, 6.5),
    ("RTX 3050", 224.0, 4.5),
    ("RTX 2080 Ti", 616.0, 9.0),
    ("RTX 2080", 448.0, 7.0),
    ("RTX 2070", 448.0, 5.5),
    ("RTX 2060", 336.0, 4.5),
    ("V100", 900.0, 10.0),
    ("T4", 320.0, 5.0),
    ("P40", 346.0, 3.0),
    ("7900 XTX", 960.0, 14.0),
    ("7900 XT", 800.0, 12.0),
    ("7800 XT", 624.0, 9.0),
    ("6950 XT", 576.0, 6.0),
    ("MI300", 5300.0, 60.0),
];

/// What is assumed of a card that is not in the table.
const UNKNOWN: Ability = Ability { memory_gbs: 400.0, prompt_tflops: 8.0, known: false };

/// What a card can do.
pub fn ability(description: &str) -> Ability {
    CARDS
        .iter()
        .find(|(name, _, _)| description.contains(name))
        .map_or(UNKNOWN, |&(_, memory_gbs, prompt_tflops)| Ability { memory_gbs, prompt_tflops, known: true })
}

/// 10^9 bytes per second of expert weights that one thread multiplies with ggml's kernels. Q8_0, the K types from 4 bits on, Q4_0, IQ4_XS and
/// IQ3_S were measured alone; MXFP4 was reckoned from a whole run (docs/planner.md); the others are taken for their neighbours.
pub fn kernel_gbs(kind: u32) -> f64 {
    match kind {
        0 | 1 | 30 => 6.5,
        2 | 3 | 6 | 7 => 5.3,
        8 | 12 | 13 | 14 => 6.3,
        10 | 11 => 5.0,
        20 | 23 => 4.6,
        16..=19 | 21 | 22 | 29 => 2.1,
        // MXFP4, NVFP4 and what is not known.
        _ => 4.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_found_whole_first() {
        assert!((ability("NVIDIA GeForce RTX 4070 Ti SUPER").prompt_tflops - 21.0).abs() < 1e-9);
        assert!((ability("NVIDIA L40S").memory_gbs - 864.0).abs() < 1e-9);
        assert!(ability("NVIDIA H200").known && !ability("A card").known);
        for (at, (name, memory, prompts)) in CARDS.iter().enumerate() {
            assert!(*memory > 0.0 && *prompts > 0.0);
            let first = CARDS.iter().position(|(other, _, _)| name.contains(other));
            assert_eq!(first, Some(at), "{name} is never found");
        }
    }
}
