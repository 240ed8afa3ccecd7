//! Multimodal models: the image encoder is a second model with a backend and buffers of its own, loaded after the language model.

use std::path::Path;

use serde_json::{Value, json};

use crate::sides::equal;
use crate::summary::{ran_in_blocks, summaries};
use crate::support::derived::{Model, noise};
use crate::support::process::Finished;
use crate::support::server::Server;
use crate::support::stock::{OVER_CPU, Side};
use crate::support::{fixture_model, text};

/// Pixels on each side of an image, and of the patches that it is cut into.
const IMAGE: u32 = 32;
const PATCH: u32 = 8;

/// The two kinds of image encoder that are tried.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    /// As in most models.
    Dense,
    /// With experts in every other layer. Stock asks nobody where they may lie: they come to the device with all else.
    Experts,
}

/// A small image encoder with meaningless weights and a projector into the bundled model's embeddings.
fn encoder(kind: Kind, path: &Path) {
    const LAYERS: u32 = 3;
    const WIDTH: u32 = 64;
    const INNER: u32 = 128;
    const EMBEDDING: u64 = 256;
    const EXPERTS: u64 = 8;
    let mut file = Model::default();
    file.keys.string("general.architecture", "clip");
    file.keys.bool("clip.has_vision_encoder", true);
    let numbers = [
        ("image_size", IMAGE),
        ("patch_size", PATCH),
        ("embedding_length", WIDTH),
        ("feed_forward_length", INNER),
        ("block_count", LAYERS),
        ("projection_dim", 256),
        ("attention.head_count", 2),
    ];
    numbers.iter().for_each(|(key, value)| file.keys.u32(&format!("clip.vision.{key}"), *value));
    file.keys.f32("clip.vision.attention.layer_norm_epsilon", 1e-5);
    file.keys.f32s("clip.vision.image_mean", &[0.5; 3]);
    file.keys.f32s("clip.vision.image_std", &[0.5; 3]);
    match kind {
        Kind::Dense => {
            file.keys.string("clip.projector_type", "mlp");
            file.keys.bool("clip.use_gelu", true);
        }
        Kind::Experts => {
            file.keys.string("clip.projector_type", "dots3note_v");
            file.keys.bool("clip.use_silu", true);
            let numbers = [
                ("spatial_merge_size", 2),
                ("image_min_pixels", IMAGE * IMAGE),
                ("image_max_pixels", IMAGE * IMAGE),
                ("expert_used_count", 2),
            ];
            numbers.iter().for_each(|(key, value)| file.keys.u32(&format!("clip.vision.{key}"), *value));
            file.floats("mm.input_norm.weight", &[WIDTH.into()], std::iter::repeat(1.0));
            file.floats("mm.input_norm.bias", &[WIDTH.into()], std::iter::repeat(0.0));
            file.floats("mm.post_norm.weight", &[WIDTH.into()], std::iter::repeat(1.0));
        }
    }
    let (width, inner, patch) = (u64::from(WIDTH), u64::from(INNER), u64::from(PATCH));
    let mut seed = 0;
    let mut add = |name: &str, shape: &[u64]| {
        seed += 1;
        file.floats(name, shape, noise(seed, 0.2));
    };
    add("v.patch_embd.weight", &[patch, patch, 3, width]);
    if kind == Kind::Dense {
        add("v.position_embd.weight", &[width, u64::from(IMAGE / PATCH).pow(2)]);
    }
    for layer in 0..LAYERS {
        let mut add = |name: &str, shape: &[u64]| add(&format!("v.blk.{layer}.{name}.weight"), shape);
        for name in ["attn_q", "attn_k", "attn_v", "attn_out"] {
            add(name, &[width, width]);
        }
        if kind == Kind::Experts && layer % 2 == 1 {
            add("ffn_gate_inp", &[width, EXPERTS]);
            add("ffn_gate_exps", &[width, inner, EXPERTS]);
            add("ffn_up_exps", &[width, inner, EXPERTS]);
            add("ffn_down_exps", &[inner, width, EXPERTS]);
        } else {
            add("ffn_up", &[width, inner]);
            add("ffn_down", &[inner, width]);
        }
    }
    // The second kind joins two by two patches into one token.
    let joined = if kind == Kind::Experts { 4 * width } else { width };
    add("mm.0.weight", &[joined, EMBEDDING]);
    add("mm.0.bias", &[EMBEDDING]);
    add("mm.2.weight", &[EMBEDDING, EMBEDDING]);
    add("mm.2.bias", &[EMBEDDING]);
    file.write(path);
}

/// An image as the server takes it, in the simplest format that stock reads: a head in text, then bytes of red, green, blue.
fn image(pixel: impl Fn(u32, u32) -> [u8; 3]) -> String {
    let mut bytes = format!("P6\n{IMAGE} {IMAGE}\n255\n").into_bytes();
    (0..IMAGE * IMAGE).for_each(|index| bytes.extend(pixel(index % IMAGE, index / IMAGE)));
    format!("data:image/x-portable-pixmap;base64,{}", base64(&bytes))
}

fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for chunk in bytes.chunks(3) {
        let word = (0..3).fold(0, |word, index| word << 8 | u32::from(chunk.get(index).copied().unwrap_or(0)));
        for index in 0..4 {
            let digit = usize::try_from(word >> (18 - 6 * index) & 63).expect("six bits");
            text.push(if index <= chunk.len() { char::from(DIGITS[digit]) } else { '=' });
        }
    }
    text
}

/// What the server says of two images: the text, and the candidates of each token with their log-probabilities.
fn ask(server: &Server) -> [Value; 2] {
    let shade = |value: u32| u8::try_from(value * 8 % 256).expect("a byte");
    let images = [image(|x, y| [shade(x), shade(y), 0]), image(|x, y| [0, shade(x * y), 200])];
    images.map(|url| {
        let content = json!([
            {"type": "text", "text": "What is a list?"}, {"type": "image_url", "image_url": {"url": url}},
        ]);
        let body = json!({
            "messages": [{"role": "user", "content": content}], "max_tokens": 16, "temperature": 0, "seed": 1,
            "logprobs": true, "top_logprobs": 3,
        });
        let answer = server.post("/v1/chat/completions", &body);
        let choice = &answer["choices"][0];
        json!([choice["message"]["content"], choice["logprobs"]["content"]])
    })
}

/// The backends of ours that ran graphs, but none with experts in our memory: those of image encoders.
fn encoders(finished: &Finished) -> usize {
    let encoder = |summary: &&Value| summary["graphs"].as_u64() > Some(0) && summary["blocks"] == 0;
    summaries(&finished.log()).iter().filter(encoder).count()
}

#[test]
fn answers_about_images_equal_stock() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("mmproj.gguf");
    encoder(Kind::Dense, &path);
    let arguments = ["-c", "512", "-np", "1", "-lv", "4", "--mmproj", text(&path)];
    let server = Server::start(Side::Stock, &fixture_model(), &arguments);
    let stock = ask(&server);
    server.stop();
    assert!(stock[0] != stock[1], "two images, one answer: {stock:?}");

    // It follows the language model's device, unless it is asked to stay on the host's default, the CPU.
    for (more, device, backends) in [(&[][..], "MoE0", 1), (&["--no-mmproj-offload"][..], "CPU", 0)] {
        let arguments = [&arguments, more].concat();
        let server = Server::start(OVER_CPU, &fixture_model(), &arguments);
        let answers = ask(&server);
        let finished = server.stop();
        assert_eq!(answers, stock, "{}", finished.report(device));
        ran_in_blocks(&finished);
        let named = finished.lines_with(&format!("CLIP using {device} backend"));
        assert!(!named.is_empty(), "{}", finished.report(&format!("the encoder is not on {device}")));
        assert_eq!(encoders(&finished), backends, "{}", finished.report("the encoder's backend"));
    }
}

/// A server that goes to sleep frees both models, and loads both again for the next request.
#[test]
fn images_after_sleep_are_answered_as_before() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("mmproj.gguf");
    encoder(Kind::Dense, &path);
    let arguments = ["-c", "512", "-np", "1", "--sleep-idle-seconds", "1", "--mmproj", text(&path)];
    let server = Server::start(OVER_CPU, &fixture_model(), &arguments);
    let before = ask(&server);
    server.wait_asleep();
    assert_eq!(ask(&server), before);
    let finished = server.stop();
    // On a busy machine the server may fall asleep once more than it is waited for.
    assert!(encoders(&finished) >= 2, "{}", finished.report("the encoder was loaded twice"));
}

#[test]
fn an_image_encoder_with_experts_equals_stock() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("mmproj.gguf");
    encoder(Kind::Experts, &path);
    let (answers, finished) = equal(&fixture_model(), &["-c", "512", "-np", "1", "--mmproj", text(&path)], ask);
    assert!(answers[0] != answers[1], "two images, one answer: {answers:?}");
    assert_eq!(encoders(&finished), 1, "{}", finished.report("the encoder's backend"));
}
