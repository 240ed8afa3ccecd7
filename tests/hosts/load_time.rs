//! How long loading takes beside stock, on a generated model large enough to measure.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Duration;

use crate::support::gguf::{Tensor, Writer};
use crate::support::process::run;
use crate::support::stock::{OVER_CPU, Side, command, model_host};
use crate::support::{kept_folder, making, text};

/// ggml's numbers of the types used here, each with its values per block and bytes per block.
const F32: (u32, (u64, u64)) = (0, (1, 4));
const Q8_0: (u32, (u64, u64)) = (8, (32, 34));
const Q4_K: (u32, (u64, u64)) = (12, (256, 144));

const LAYERS: u32 = 8;
const EMBEDDING: u32 = 1024;
const FEED_FORWARD: u32 = 768;
const EXPERTS: u32 = 96;
const VOCABULARY: u32 = 512;

/// A MoE model of about 1 GiB with meaningless weights, written once and kept.
fn large_model() -> PathBuf {
    static MODEL: Mutex<()> = Mutex::new(());
    let _making = making(&MODEL);
    let path = kept_folder("models").join(format!("large-{LAYERS}x{EXPERTS}.gguf"));
    if !path.is_file() {
        let part = path.with_extension("part");
        describe().write(&part, fill);
        fs::rename(&part, &path).expect("the model gets its name");
    }
    path
}

fn describe() -> Writer {
    let mut file = Writer::default();
    file.string("general.architecture", "qwen3moe");
    let numbers = [
        ("block_count", LAYERS),
        ("context_length", 4096),
        ("embedding_length", EMBEDDING),
        ("feed_forward_length", FEED_FORWARD),
        ("expert_feed_forward_length", FEED_FORWARD),
        ("attention.head_count", 8),
        ("attention.head_count_kv", 2),
        ("attention.key_length", 128),
        ("attention.value_length", 128),
        ("expert_count", EXPERTS),
        ("expert_used_count", 8),
        ("vocab_size", VOCABULARY),
    ];
    numbers.iter().for_each(|(key, value)| file.u32(&format!("qwen3moe.{key}"), *value));
    file.f32("qwen3moe.attention.layer_norm_rms_epsilon", 1e-6);
    file.f32("qwen3moe.rope.freq_base", 1e6);
    // Stock's own dummy tokenizer, which needs nothing but a list.
    file.string("tokenizer.ggml.model", "test");
    file.strings("tokenizer.ggml.tokens", &(0..VOCABULARY).map(|id| format!("tok_{id}")).collect::<Vec<_>>());
    let (embedding, feed_forward, experts) = (u64::from(EMBEDDING), u64::from(FEED_FORWARD), u64::from(EXPERTS));
    let mut add = |name: &str, (kind, block): (u32, (u64, u64)), shape: &[u64]| file.tensor(name, kind, block, shape);
    add("token_embd.weight", Q8_0, &[embedding, VOCABULARY.into()]);
    add("output_norm.weight", F32, &[embedding]);
    for layer in 0..LAYERS {
        let mut add = |name: &str, kind, shape: &[u64]| add(&format!("blk.{layer}.{name}.weight"), kind, shape);
        add("attn_norm", F32, &[embedding]);
        add("attn_q", Q8_0, &[embedding, 1024]);
        add("attn_k", Q8_0, &[embedding, 256]);
        add("attn_v", Q8_0, &[embedding, 256]);
        add("attn_output", Q8_0, &[1024, embedding]);
        add("attn_q_norm", F32, &[128]);
        add("attn_k_norm", F32, &[128]);
        add("ffn_norm", F32, &[embedding]);
        add("ffn_gate_inp", F32, &[embedding, experts]);
        add("ffn_gate_exps", Q4_K, &[embedding, feed_forward, experts]);
        add("ffn_up_exps", Q4_K, &[embedding, feed_forward, experts]);
        add("ffn_down_exps", Q4_K, &[feed_forward, embedding, experts]);
    }
    file
}

/// Any finite weights will do: a block of zero bytes is zero in every type here, and loading copies zeros like anything else.
/// The counter keeps the file from being sparse.
fn fill(tensor: &Tensor, count: u64, output: &mut dyn Write) -> std::io::Result<()> {
    let mut block = vec![0_u8; 1 << 16];
    if tensor.kind != F32.0 {
        // The last bytes of a Q4_K block are 4-bit values and the scales before them stay zero.
        block.chunks_exact_mut(144).for_each(|chunk| chunk[16..].fill(0x5a));
    }
    let mut left = count;
    while left > 0 {
        let step = left.min(block.len() as u64);
        output.write_all(&block[..usize::try_from(step).unwrap_or(block.len())])?;
        left -= step;
    }
    Ok(())
}

/// The microseconds that one load takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Time {
    /// Of the processor: what the loader does, whatever else the machine does at the time.
    work: u64,
    /// On the clock, for the log.
    wall: u64,
}

fn load(side: Side<'_>, mode: &str, model: &Path) -> Time {
    let devices = if matches!(side, Side::Stock) { "cpu" } else { "MoE0" };
    let mut command = command(&model_host(), side);
    let finished = run(command.args(["load", mode, devices, text(model)]), Duration::from_secs(60)).success();
    let mut numbers = finished.stdout.split_whitespace().map(str::parse);
    match (numbers.next(), numbers.next()) {
        (Some(Ok(work)), Some(Ok(wall))) => Time { work, wall },
        _ => panic!("{}", finished.report("no times")),
    }
}

/// The least disturbed of several runs that alternate between stock and the plugin, by work: neighbours on the machine, and a
/// hypervisor that hands out memory as it is first touched, only ever make a run slower. Stops when `enough` says so.
fn best_of(mode: &str, enough: impl Fn(Time, Time, usize) -> bool) -> (Time, Time) {
    let model = large_model();
    // Both sides read from the page cache.
    load(Side::Stock, mode, &model);
    let (mut stock, mut plugin) = (load(Side::Stock, mode, &model), load(OVER_CPU, mode, &model));
    let mut pairs = 1;
    while !enough(stock, plugin, pairs) {
        stock = stock.min(load(Side::Stock, mode, &model));
        plugin = plugin.min(load(OVER_CPU, mode, &model));
        pairs += 1;
    }
    println!("load, -lm {mode}, best of {pairs}, in us: stock {stock:?}, plugin {plugin:?}");
    (stock, plugin)
}

#[test]
fn loading_is_as_quick_as_stock_without_mapping() {
    let within = |stock: Time, plugin: Time| plugin.work * 10 <= stock.work * 11;
    let (stock, plugin) = best_of("none", |stock, plugin, pairs| pairs == 24 || pairs >= 3 && within(stock, plugin));
    assert!(within(stock, plugin), "loading takes over 10% more than in stock: {plugin:?}, {stock:?}");
}

/// Stock maps the file and copies nothing, so there is no bar here: the figures are for the log.
#[test]
fn loading_from_a_mapping_works() {
    let (stock, plugin) = best_of("mmap", |_, _, pairs| pairs == 3);
    assert!(stock.work > 0 && plugin.work > 0);
}
