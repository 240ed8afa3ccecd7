//! The types of tensors: how many values a block of each holds, and in how many bytes.
//!
//! Owns: the table. Numbers that ggml gave up, or does not store in files, are missing. `tests/model.rs` compares it with the host's.
//! Threads: none. Does not: decode values.

/// One type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Type {
    /// ggml's number.
    pub number: u32,
    /// ggml's name.
    pub name: &'static str,
    /// Values of a block.
    pub values: u64,
    /// Bytes of a block.
    pub bytes: u64,
}

const fn row(number: u32, name: &'static str, values: u64, bytes: u64) -> Type {
    Type { number, name, values, bytes }
}

/// Every type, by number.
pub static TYPES: [Type; 35] = [
    row(0, "f32", 1, 4),
    row(1, "f16", 1, 2),
    row(2, "q4_0", 32, 18),
    row(3, "q4_1", 32, 20),
    row(6, "q5_0", 32, 22),
    row(7, "q5_1", 32, 24),
    row(8, "q8_0", 32, 34),
    row(9, "q8_1", 32, 36),
    row(10, "q2_K", 256, 84),
    row(11, "q3_K", 256, 110),
    row(12, "q4_K", 256, 144),
    row(13, "q5_K", 256, 176),
    row(14, "q6_K", 256, 210),
    row(15, "q8_K", 256, 292),
    row(16, "iq2_xxs", 256, 66),
    row(17, "iq2_xs", 256, 74),
    row(18, "iq3_xxs", 256, 98),
    row(19, "iq1_s", 256, 50),
    row(20, "iq4_nl", 32, 18),
    row(21, "iq3_s", 256, 110),
    row(22, "iq2_s", 256, 82),
    row(23, "iq4_xs", 256, 136),
    row(24, "i8", 1, 1),
    row(25, "i16", 1, 2),
    row(26, "i32", 1, 4),
    row(27, "i64", 1, 8),
    row(28, "f64", 1, 8),
    row(29, "iq1_m", 256, 56),
    row(30, "bf16", 1, 2),
    row(34, "tq1_0", 256, 54),
    row(35, "tq2_0", 256, 66),
    row(39, "mxfp4", 32, 17),
    row(40, "nvfp4", 64, 36),
    row(41, "q1_0", 128, 18),
    row(42, "q2_0", 64, 18),
];

impl Type {
    /// The type of this number.
    pub fn of(number: u32) -> Option<&'static Self> {
        TYPES.iter().find(|known| known.number == number)
    }

    /// Bytes of a tensor; `None` if a row is no whole number of blocks, or the sum overflows.
    pub fn tensor_bytes(&self, shape: &[u64]) -> Option<u64> {
        let row = shape.first().copied().unwrap_or(1);
        if !row.is_multiple_of(self.values) {
            return None;
        }
        let rows = shape.iter().skip(1).try_fold(1_u64, |product, extent| product.checked_mul(*extent))?;
        (row / self.values).checked_mul(self.bytes)?.checked_mul(rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_of_tensors() {
        let of = |number| Type::of(number).unwrap();
        assert_eq!(of(0).tensor_bytes(&[3, 2]), Some(24));
        assert_eq!(of(12).tensor_bytes(&[512, 4, 3]), Some(2 * 144 * 12));
        assert_eq!(of(12).tensor_bytes(&[100]), None, "no whole block");
        assert_eq!(of(0).tensor_bytes(&[1 << 40, 1 << 40]), None, "too many");
        assert_eq!(of(0).tensor_bytes(&[]), Some(4));
        assert_eq!(Type::of(31), None);
    }

    #[test]
    fn numbers_ascend() {
        assert!(TYPES.windows(2).all(|pair| pair[0].number < pair[1].number));
    }
}
