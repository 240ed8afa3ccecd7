//! The functions between gate, up and down, as ggml's CPU backend computes them.
//!
//! Owns: the list of activations and their arithmetic, in the order of ggml's operations, so that results are equal bit for bit.
//! Invariants: every value depends on its own place only, so a row may be computed in parts (of 16 values, where the host computes whole
//! vectors).
//! Threads: any; nothing is kept.
//! Does not: scale or add biases.

use crate::abi::cpu_kernels::{Values, erf};

/// What happens between the two halves of a block.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Activation {
    // With a gate: a function of the gate, times up.
    Swiglu,
    Geglu,
    GegluErf,
    GegluQuick,
    Reglu,
    /// GLU `SWIGLU_OAI`: gate up to `limit`, up within `limit` and one more.
    SwigluOai {
        alpha: f32,
        limit: f32,
    },
    /// GLU `SWIGLU_CLAMP`: gate up to `limit`, up within it.
    SwigluClamp {
        limit: f32,
    },
    /// SILU of the gate up to `limit`, times up within it: nodes CLAMP, SILU, CLAMP and MUL.
    SwigluLimited {
        limit: f32,
    },
    // Without a gate: a function of up.
    Silu,
    Gelu,
    GeluErf,
    GeluQuick,
    Relu,
    /// Nodes RELU and SQR.
    ReluSqr,
}

/// As C++'s `std::clamp`: what is not a number stays.
fn clamp(value: f32, least: f32, most: f32) -> f32 {
    if value < least {
        least
    } else if most < value {
        most
    } else {
        value
    }
}

fn at_most(value: f32, most: f32) -> f32 {
    if most < value { most } else { value }
}

fn relu(value: f32) -> f32 {
    if value > 0.0 { value } else { 0.0 }
}

fn gelu_erf(value: f32) -> f32 {
    0.5 * value * (1.0 + erf(value * core::f32::consts::FRAC_1_SQRT_2))
}

fn each(row: &mut [f32], function: impl Fn(f32) -> f32) {
    for value in row {
        *value = function(*value);
    }
}

fn both(row: &mut [f32], factors: &[f32], function: impl Fn(f32, f32) -> f32) {
    for (value, &factor) in row.iter_mut().zip(factors) {
        *value = function(*value, factor);
    }
}

impl Activation {
    /// Whether it takes a gate beside up.
    pub(crate) fn is_gated(self) -> bool {
        !matches!(self, Self::Silu | Self::Gelu | Self::GeluErf | Self::GeluQuick | Self::Relu | Self::ReluSqr)
    }

    /// Computes it in place: `row` is the gate and `up` the up, or `row` the up and `up` empty.
    pub(crate) fn apply(self, values: &Values, row: &mut [f32], up: &[f32]) {
        match self {
            Self::Swiglu => values.swiglu(row, up),
            Self::Geglu => values.gelu(row, Some(up)),
            Self::GegluErf => both(row, up, |x, g| gelu_erf(x) * g),
            Self::GegluQuick => values.gelu_quick(row, Some(up)),
            Self::Reglu => both(row, up, |x, g| if x > 0.0 { x * g } else { 0.0 }),
            Self::SwigluOai { alpha, limit } => both(row, up, |x, g| {
                let (x, y) = (at_most(x, limit), clamp(g, -limit, limit));
                x / (1.0 + (alpha * -x).exp()) * (y + 1.0)
            }),
            Self::SwigluClamp { limit } => both(row, up, |x, g| {
                let (x, y) = (at_most(x, limit), clamp(g, -limit, limit));
                x / (1.0 + (-x).exp()) * y
            }),
            Self::SwigluLimited { limit } => {
                values.silu(row);
                both(row, up, |x, g| at_most(x, limit) * clamp(g, -limit, limit));
            }
            Self::Silu => values.silu(row),
            Self::Gelu => values.gelu(row, None),
            Self::GeluErf => each(row, gelu_erf),
            Self::GeluQuick => values.gelu_quick(row, None),
            Self::Relu => each(row, relu),
            Self::ReluSqr => each(row, |x| relu(x) * relu(x)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::cpu_kernels::tests::plain_values;

    #[test]
    fn known_values() {
        let of = |activation: Activation, x: f32, g: f32| {
            let mut row = [x];
            activation.apply(&plain_values(), &mut row, &[g]);
            row[0]
        };
        let oai = Activation::SwigluOai { alpha: 1.0, limit: 7.0 };
        assert_eq!(of(oai, 100.0, -100.0), 7.0 / (1.0 + (-7.0_f32).exp()) * -6.0);
        assert_eq!(of(Activation::SwigluClamp { limit: 2.0 }, 0.0, 5.0), 0.0);
        assert_eq!(of(Activation::Reglu, -1.0, f32::INFINITY), 0.0);
        assert_eq!(of(Activation::ReluSqr, 3.0, 0.0), 9.0);
        assert_eq!(of(Activation::SwigluLimited { limit: 1.0 }, 50.0, 3.0), 1.0);
        assert!(of(oai, f32::NAN, 1.0).is_nan() && of(Activation::SwigluClamp { limit: 1.0 }, 1.0, f32::NAN).is_nan());
        assert!(Activation::Geglu.is_gated() && !Activation::Gelu.is_gated());
    }
}
