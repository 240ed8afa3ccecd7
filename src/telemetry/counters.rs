//! Counters of one backend, and their JSON form.

use std::fmt::Write as _;

/// What one backend did since it was made.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Graphs that the host handed over.
    pub graphs: u64,
    /// Their nodes.
    pub nodes: u64,
    /// Parts handed to the inner backend, blocks and single products included.
    pub segments: u64,
    /// MoE blocks run.
    pub blocks: u64,
    /// Most blocks recognised in one graph.
    pub blocks_max: u64,
    /// Expert products run outside any recognised block.
    pub unrecognised: u64,
    /// Expert products run by the plain path, inside blocks or not.
    pub plain_nodes: u64,
    /// Bytes of expert weights copied to the inner device.
    pub expert_bytes: u64,
    /// Pairs of token and expert whose expert lay on the device.
    pub hits: u64,
    /// Those whose expert was computed in RAM.
    pub misses: u64,
    /// Bytes of weights read by the processor for them.
    pub cpu_bytes: u64,
    /// Bytes of weights loaded into the cache.
    pub upload_bytes: u64,
    /// MoE blocks of long passes, whose experts were brought as a whole.
    pub streamed_blocks: u64,
    /// Parts that the inner backend captured as CUDA graphs (a lower bound, see `graph::ReplayLedger`).
    pub graphs_captured: u64,
    /// Parts that it replayed.
    pub graphs_replayed: u64,
    /// Captured parts that changed and start over.
    pub graphs_reset: u64,
}

impl Counters {
    /// One line of JSON. `device` and `inner` are device names.
    pub fn json(&self, device: &str, inner: &str) -> String {
        let mut line = format!("{{\"device\":{},\"inner\":{}", quoted(device), quoted(inner));
        for (name, value) in [
            ("graphs", self.graphs),
            ("nodes", self.nodes),
            ("segments", self.segments),
            ("blocks", self.blocks),
            ("blocks_max", self.blocks_max),
            ("unrecognised", self.unrecognised),
            ("plain_nodes", self.plain_nodes),
            ("expert_bytes", self.expert_bytes),
            ("hits", self.hits),
            ("misses", self.misses),
            ("cpu_bytes", self.cpu_bytes),
            ("upload_bytes", self.upload_bytes),
            ("streamed_blocks", self.streamed_blocks),
            ("graphs_captured", self.graphs_captured),
            ("graphs_replayed", self.graphs_replayed),
            ("graphs_reset", self.graphs_reset),
        ] {
            // Writing to a String cannot fail.
            let _ = write!(line, ",\"{name}\":{value}");
        }
        line.push('}');
        line
    }
}

fn quoted(text: &str) -> String {
    let mut out = String::from("\"");
    for c in text.chars() {
        match c {
            '"' | '\\' => {
                out.push('\\');
                out.push(c);
            }
            c if c.is_control() => {
                let _ = write!(out, "\\u{:04x}", u32::from(c));
            }
            c => out.push(c),
        }
    }
    out.push('"');
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_is_json() {
        let counters = Counters { graphs: 2, expert_bytes: 1 << 40, ..Counters::default() };
        let value: serde_json::Value = serde_json::from_str(&counters.json("MoE0", "a\"b\\\n")).unwrap();
        assert_eq!(value["device"], "MoE0");
        assert_eq!(value["inner"], "a\"b\\\n");
        assert_eq!(value["graphs"], 2);
        assert_eq!(value["expert_bytes"], 1_u64 << 40);
    }
}
