//! Random numbers as NumPy's `default_rng(seed)` gives them, so that a seed means the same trace here and in the Python model.
//!
//! Owns: the seeding (SeedSequence), the generator (PCG64, XSL-RR) and the three draws that the routing model needs.
//! Written from the published descriptions: O'Neill 2014 (PCG), Marsaglia and Tsang 2000 (ziggurat).
//! The ziggurat's tables are computed here; a last bit that differs from NumPy's would move one draw in 10^13.
//! Threads: none. Does not: serve anything but simulations; it is no source of secrets.
#![expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "the generators are defined by taking low and high halves, and by casts of numbers in range"
)]

use std::sync::OnceLock;

const MULTIPLIER: u128 = 0x2360_ed05_1fc6_5da4_4385_df64_9fcc_f645;

/// A stream of random numbers.
#[derive(Clone, Debug)]
pub struct Random {
    state: u128,
    increment: u128,
    /// The unused half of the last 64-bit draw, for draws of 32 bits.
    half: Option<u32>,
}

impl Random {
    /// The stream of a seed.
    pub fn new(seed: u64) -> Self {
        let [a, b, c, d] = spread(seed);
        let increment = ((u128::from(c) << 64 | u128::from(d)) << 1) | 1;
        let mut random = Self { state: 0, increment, half: None };
        random.step();
        random.state = random.state.wrapping_add(u128::from(a) << 64 | u128::from(b));
        random.step();
        random
    }

    fn step(&mut self) {
        self.state = self.state.wrapping_mul(MULTIPLIER).wrapping_add(self.increment);
    }

    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.step();
        ((self.state >> 64) as u64 ^ self.state as u64).rotate_right((self.state >> 122) as u32)
    }

    fn half_bits(&mut self) -> u32 {
        if let Some(half) = self.half.take() {
            return half;
        }
        let bits = self.bits();
        self.half = Some((bits >> 32) as u32);
        bits as u32
    }

    /// Uniform in [0, 1).
    pub fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 * (1.0 / 9_007_199_254_740_992.0)
    }

    /// Uniform in 0..=most, by rejection under a mask.
    fn up_to(&mut self, most: u32) -> u32 {
        let mask = u32::MAX.checked_shr(most.leading_zeros()).unwrap_or(0);
        loop {
            let value = self.half_bits() & mask;
            if value <= most {
                return value;
            }
        }
    }

    /// A random order of 0..count.
    pub fn permutation(&mut self, count: u32) -> Vec<u32> {
        let mut order: Vec<u32> = (0..count).collect();
        for last in (1..count).rev() {
            order.swap(last as usize, self.up_to(last) as usize);
        }
        order
    }

    /// A normal variate of mean 0 and variance 1.
    pub fn normal(&mut self) -> f64 {
        let table = ziggurat();
        loop {
            let bits = self.bits();
            let layer = (bits & 0xff) as usize;
            let bits = bits >> 8;
            let size = (bits >> 1) & 0x000f_ffff_ffff_ffff;
            let sign = if bits & 1 == 1 { -1.0 } else { 1.0 };
            let x = sign * (size as f64 * table.width[layer]);
            if size < table.inside[layer] {
                return x;
            }
            if layer == 0 {
                loop {
                    let across = -(-self.unit()).ln_1p() / EDGE;
                    let down = -(-self.unit()).ln_1p();
                    if down + down > across * across {
                        return if (size >> 8) & 1 == 1 { -(EDGE + across) } else { EDGE + across };
                    }
                }
            }
            let (above, below) = (table.height[layer - 1], table.height[layer]);
            if (above - below) * self.unit() + below < (-0.5 * x * x).exp() {
                return x;
            }
        }
    }

    /// A Gumbel variate of location 0 and scale 1.
    pub fn gumbel(&mut self) -> f64 {
        loop {
            let unit = 1.0 - self.unit();
            if unit < 1.0 {
                return -(-unit.ln()).ln();
            }
        }
    }
}

/// Where the tail of the ziggurat begins, and the area of each of its layers.
const EDGE: f64 = 3.654_152_885_361_009;
const AREA: f64 = 0.004_928_673_233_974_658;

struct Ziggurat {
    /// Below this, a draw lies inside the layer for certain.
    inside: [u64; 256],
    width: [f64; 256],
    height: [f64; 256],
}

fn ziggurat() -> &'static Ziggurat {
    static TABLE: OnceLock<Ziggurat> = OnceLock::new();
    TABLE.get_or_init(|| {
        const SCALE: f64 = 4_503_599_627_370_496.0;
        let density = |x: f64| (-0.5 * x * x).exp();
        let mut table = Ziggurat { inside: [0; 256], width: [0.0; 256], height: [1.0; 256] };
        let base = AREA / density(EDGE);
        table.inside[0] = (EDGE / base * SCALE) as u64;
        table.width[0] = base / SCALE;
        table.width[255] = EDGE / SCALE;
        table.height[255] = density(EDGE);
        let mut x = EDGE;
        for layer in (1..255).rev() {
            let next = (-2.0 * (AREA / x + density(x)).ln()).sqrt();
            table.inside[layer + 1] = (next / x * SCALE) as u64;
            table.width[layer] = next / SCALE;
            table.height[layer] = density(next);
            x = next;
        }
        table
    })
}

/// Spreads a seed over 256 bits.
fn spread(seed: u64) -> [u64; 4] {
    const POOL: usize = 4;
    let mut constant: u32 = 0x43b0_d7e5;
    let mut hash = |value: u32| {
        let value = value ^ constant;
        constant = constant.wrapping_mul(0x931e_8875);
        let value = value.wrapping_mul(constant);
        value ^ (value >> 16)
    };
    let mix = |x: u32, y: u32| {
        let mixed = x.wrapping_mul(0xca01_f9dd).wrapping_sub(y.wrapping_mul(0x4973_f715));
        mixed ^ (mixed >> 16)
    };
    let words = [seed as u32, (seed >> 32) as u32];
    let given = if words[1] == 0 { 1 } else { 2 };
    let mut pool = [0_u32; POOL];
    for (at, slot) in pool.iter_mut().enumerate() {
        *slot = hash(if at < given { words[at] } else { 0 });
    }
    for from in 0..POOL {
        for to in (0..POOL).filter(|&to| to != from) {
            pool[to] = mix(pool[to], hash(pool[from]));
        }
    }
    let mut constant: u32 = 0x8b51_f9dd;
    let mut out = [0_u32; 8];
    for (word, &value) in out.iter_mut().zip(pool.iter().cycle()) {
        let value = value ^ constant;
        constant = constant.wrapping_mul(0x58f3_8ded);
        let value = value.wrapping_mul(constant);
        *word = value ^ (value >> 16);
    }
    std::array::from_fn(|at| u64::from(out[2 * at]) | u64::from(out[2 * at + 1]) << 32)
}

#[cfg(test)]
mod tests {
    use super::*;

    // The numbers are NumPy's: numpy.random.default_rng(seed).

    #[test]
    fn seeds_give_the_same_bits() {
        for (seed, first, second) in [
            (0, 0xa30f_ebcf_d9c2_825f, 0x4510_bdf8_82d9_d721),
            (3, 0x15ed_1a93_cfbe_c2f8, 0x3c9f_9d05_2def_d3f5),
            ((1 << 40) + 7, 0xd46e_9e20_34de_21aa, 0x415b_adc9_9c08_7675),
        ] {
            let mut random = Random::new(seed);
            assert_eq!([random.bits(), random.bits()], [first, second], "seed {seed}");
        }
    }

    #[test]
    fn draws_follow_each_other_as_there() {
        let mut random = Random::new(3);
        assert_eq!(random.permutation(10), [9, 6, 0, 2, 1, 4, 7, 5, 3, 8]);
        assert_eq!(random.permutation(7), [6, 0, 4, 1, 5, 2, 3]);
        for expected in [3.322_999_516_644_882_7, 0.225_786_613_227_921_76, -0.352_630_794_341_595_4] {
            let draw = random.normal();
            assert!((draw - expected).abs() < 1e-13, "{draw} {expected}");
        }
        random.normal();
        for expected in [0.123_501_761_459_615_59, -0.291_767_591_092_189_7, -1.140_923_778_212_274_8] {
            let draw = random.gumbel();
            assert!((draw - expected).abs() < 1e-13, "{draw} {expected}");
        }
        assert!((random.unit() - 0.284_201_163_748_791_45).abs() < 1e-16);
    }

    #[test]
    fn a_million_normals_go_through_every_branch() {
        let mut random = Random::new(5);
        let draws: Vec<f64> = (0..1_000_000).map(|_| random.normal()).collect();
        let most = draws.iter().copied().fold(0.0, f64::max);
        assert!((draws.iter().sum::<f64>() - 1_447.441_964_271_736_8).abs() < 1e-6);
        assert!((most - 4.759_483_563_074_127).abs() < 1e-12, "{most}");
        assert!((draws[999_999] - 3.056_638_776_846_415).abs() < 1e-12);
    }
}
