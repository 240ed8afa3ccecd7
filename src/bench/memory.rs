//! What a host takes of a device, and what stock must give up for larger micro-batches so that its memory stays the same.
//!
//! Owns: the reading of the host's account by micro-batch ([`Account`]), the line through it ([`Computing`]), and the number of layers
//! whose experts stock keeps in RAM for a micro-batch.
//! Invariants: a larger micro-batch never leaves stock more experts on the device.
//! Threads: none. Does not: start a program.

use super::placement::cpu_layers;
use crate::model::moe::MoeShape;

/// MiB of one device by the host's own account.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Account {
    /// Weights.
    pub weights_mib: f64,
    /// The largest context.
    pub context_mib: f64,
    /// Computing, by micro-batch; of several contexts the largest.
    pub computing: Vec<(u64, f64)>,
}

impl Account {
    /// Reads what a process printed with `-v`.
    pub fn read(log: &str, device: &str) -> Self {
        let mut account = Self::default();
        let mut ubatch = 0;
        for line in log.lines() {
            if let Some((_, size)) = line.split_once("n_ubatch").filter(|_| line.contains("llama_context:")) {
                ubatch = size.trim_start_matches([' ', '=']).trim().parse().unwrap_or(ubatch);
            }
            let Some((before, size)) = line.split_once(" buffer size =") else { continue };
            let Some(mib) = size.trim().strip_suffix("MiB").and_then(|size| size.trim().parse::<f64>().ok()) else {
                continue;
            };
            let mut words = before.split_whitespace().skip_while(|word| *word != device);
            match (words.next(), words.next()) {
                (Some(_), Some("model")) => account.weights_mib += mib,
                (Some(_), Some("KV")) => account.context_mib = account.context_mib.max(mib),
                (Some(_), Some("compute")) => match account.computing.iter_mut().find(|row| row.0 == ubatch) {
                    Some(row) => row.1 = row.1.max(mib),
                    None => account.computing.push((ubatch, mib)),
                },
                _ => {}
            }
        }
        account
    }

    /// Everything with this micro-batch.
    pub fn total_mib(&self, ubatch: u64) -> Option<f64> {
        let computing = self.computing.iter().find(|row| row.0 == ubatch)?.1;
        Some(self.weights_mib + self.context_mib + computing)
    }
}

/// Memory for computing: a part for each token of a micro-batch, and a rest.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Computing {
    token_mib: f64,
    rest_mib: f64,
}

impl Computing {
    /// The line through the smallest and the largest micro-batch that was measured.
    pub fn through(measured: &[(u64, f64)]) -> Option<Self> {
        let (first, last) = (measured.iter().min_by_key(|row| row.0)?, measured.iter().max_by_key(|row| row.0)?);
        if first.0 == last.0 {
            return None;
        }
        let token_mib = ((last.1 - first.1) / (last.0 - first.0) as f64).max(0.0);
        Some(Self { token_mib, rest_mib: first.1 - token_mib * first.0 as f64 })
    }

    /// MiB of a micro-batch.
    pub fn mib(&self, ubatch: u64) -> f64 {
        self.token_mib.mul_add(ubatch as f64, self.rest_mib)
    }
}

/// What `-ncmoe` is for stock with this micro-batch, so that it takes no more than with one of `base` and so many MiB of experts.
pub fn equal_layers(shape: &MoeShape, experts_mib: u64, computing: &Computing, base: u64, ubatch: u64) -> u32 {
    let more = (computing.mib(ubatch) - computing.mib(base)).max(0.0).ceil();
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a size; the cast saturates")]
    let more = more as u64;
    cpu_layers(shape, experts_mib.saturating_sub(more))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::moe::ExpertLayer;
    use proptest::prelude::*;

    const LOG: &str = "load_tensors:        CUDA0 model buffer size =  7000.50 MiB\nload_tensors:    CUDA_Host model buffer size =  99.0 MiB\n\
        llama_context: n_ubatch              = 512\nllama_kv_cache:      CUDA0 KV buffer size =    48.00 MiB\n\
        sched_reserve:      CUDA0 compute buffer size =   100.00 MiB\nsched_reserve:  CUDA_Host compute buffer size =   9.00 MiB\n\
        llama_context: n_ubatch              = 2048\nllama_kv_cache:      CUDA0 KV buffer size =    96.00 MiB\n\
        sched_reserve:      CUDA0 compute buffer size =   250.00 MiB\n\
        ~llama_context:      CUDA0 compute buffer size is 250.0000 MiB, matches expectation of 250.0000 MiB\n";

    #[test]
    fn the_hosts_account_by_micro_batch() {
        let account = Account::read(LOG, "CUDA0");
        assert_eq!(account.computing, [(512, 100.0), (2048, 250.0)]);
        assert_eq!((account.total_mib(2048), account.total_mib(4096)), (Some(7346.5), None));
        let computing = Computing::through(&account.computing).unwrap();
        assert!((computing.mib(4096) - 450.0).abs() < 1e-9);
        assert_eq!(Computing::through(&[(512, 1.0)]), None);
        assert_eq!(Account::read("", "CUDA0"), Account::default());
    }

    fn shape(layers: u32) -> MoeShape {
        let layer = |layer| ExpertLayer { layer, experts: 128, bytes: 324 << 20, kind: vec![(12, 1, 1)] };
        MoeShape {
            architecture: "x".into(),
            layers,
            used: 8,
            expert_layers: (0..layers).map(layer).collect(),
            dense_bytes: 0,
            input_bytes: 0,
        }
    }

    #[test]
    fn a_larger_micro_batch_takes_layers_from_stock() {
        let computing = Computing { token_mib: 0.2, rest_mib: 200.0 };
        let layers = |ubatch| equal_layers(&shape(48), 7128, &computing, 512, ubatch);
        assert_eq!(layers(512), 26, "22 layers of 324 MiB");
        assert_eq!(layers(2048), 27, "307 MiB more");
        assert_eq!(layers(12288), 34, "2355 MiB more");
        assert_eq!(layers(1 << 20), 48);
    }

    proptest! {
        #[test]
        fn never_more_experts_for_more_tokens(mib in 0_u64..20_000, token in 0.0_f64..2.0, a in 1_u64..20_000, b in 1_u64..20_000) {
            let computing = Computing { token_mib: token, rest_mib: 10.0 };
            let layers = |ubatch| equal_layers(&shape(48), mib, &computing, 512, ubatch);
            prop_assert!(layers(a.min(b)) <= layers(a.max(b)));
        }
    }
}
