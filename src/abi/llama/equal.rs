//! Passes of equal length: the functions of llama.cpp by which a host builds batches, has them computed and reads what came of it.
//!
//! Owns: the exports that keep note of batches and contexts, and the calls by which a batch is computed in parts.
//! Invariants: of a context that is not known (`preload::equal`) every function does what the host's does, with the same arguments. A batch of
//! the host is never changed; parts are batches of our own. Where a part is refused, what was computed before it is taken back.
//! Threads: any. Does not: decide what is cut (`preload::equal` does).
#![cfg_attr(test, expect(non_snake_case, reason = "names of the host's, which a test program does not export"))]

use core::ffi::{CStr, c_int, c_void};
use core::mem::transmute;
use core::ptr::null_mut;
use core::sync::atomic::AtomicPtr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use super::params::CONTEXT_BYTES;
use super::{Registers, address, contained, in_order, naked_asm, next};
use crate::backend::graphs_with_experts;
use crate::preload::equal::{self, Parts};
use crate::telemetry::log;

/// The host's numbers for a batch that is decoded, for contexts that pool nothing, and for a batch for which there is no room.
const DECODE: c_int = 1;
const NO_POOLING: c_int = 0;
const NO_ROOM: c_int = 1;

/// A C string out of an identifier.
macro_rules! name_of {
    ($name:ident) => {
        const {
            match CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                Ok(name) => name,
                Err(_) => panic!("a name with a zero"),
            }
        }
    };
}

/// Exports that look at their arguments, may change them, and jump to the function of the same name.
macro_rules! jumping {
    ($($(#[$doc:meta])* $name:ident: $look:expr,)*) => {
        $(
            #[expect(clippy::allow_attributes, reason = "only some names are mangled")]
            #[allow(non_snake_case, reason = "a name of the host's")]
            mod $name {
                use super::*;

                pub(super) unsafe extern "C" fn prepare(registers: *mut Registers, _stack: *mut u8) -> *mut c_void {
                    static REAL: AtomicPtr<c_void> = AtomicPtr::new(null_mut());
                    contained(|| {
                        let look: fn(&mut Registers) = $look;
                        // SAFETY: the caller saved them there; nobody else knows them.
                        look(unsafe { &mut *registers });
                    });
                    next(&REAL, name_of!($name))
                }
            }
        )*
        before! { $($(#[$doc])* $name: $name::prepare,)* }
    };
}

/// Six arguments in registers, whatever they are: functions that take fewer do not look at the others.
type Words = unsafe extern "C-unwind" fn(u64, u64, u64, u64, u64, u64) -> u64;

/// Exports that call the function of the same name and then look at arguments and result.
macro_rules! calling {
    ($($(#[$doc:meta])* $name:ident: $note:expr,)*) => {$(
        $(#[$doc])*
        ///
        /// # Safety
        /// Called as the function of this name is, by the host only.
        #[cfg_attr(not(test), unsafe(no_mangle))]
        pub unsafe extern "C-unwind" fn $name(a: u64, b: u64, c: u64, d: u64, e: u64, f: u64) -> u64 {
            static REAL: AtomicPtr<c_void> = AtomicPtr::new(null_mut());
            let real = next(&REAL, name_of!($name));
            if real.is_null() {
                return 0;
            }
            // SAFETY: a function whose arguments and result are integers or pointers, six at most.
            let real = unsafe { transmute::<*mut c_void, Words>(real) };
            // SAFETY: what the caller passed.
            let result = unsafe { real(a, b, c, d, e, f) };
            let note: fn(u64, u64, u64, u64) = $note;
            contained(|| note(a, b, c, result));
            result
        }
    )*};
}

#[expect(clippy::cast_possible_truncation, reason = "an argument of type int fills half of the register")]
fn int(register: u64) -> i32 {
    register as i32
}

/// The host's `bool`, of which only the last byte is set.
fn flag(register: u64) -> bool {
    register & 0xff != 0
}

/// An index in a batch, in the half of a register that the host reads.
fn move_index(context: u64, register: &mut u64) {
    let index = equal::index(address(context), int(*register));
    *register = u64::from(index.cast_unsigned());
}

fn move_second(registers: &mut Registers) {
    move_index(registers.rdi, &mut registers.rsi);
}

fn begin(registers: &mut Registers) {
    equal::begin(address(registers.rdi));
}

fn embed(registers: &mut Registers) {
    equal::embed(address(registers.rdi));
}

fn refuse_batch(registers: &mut Registers) {
    equal::refuse_batch(address(registers.rdi));
}

/// Refuses a context of which something is read for every token.
fn refuse_context(registers: &mut Registers) {
    equal::refuse_context(address(registers.rdi));
}

fn set_output(batch: u64, index: u64, value: u64, result: u64) {
    if flag(result) {
        equal::set_output(address(batch), int(index), flag(value));
    } else {
        equal::refuse_batch(address(batch));
    }
}

fn set_position(batch: u64, index: u64, positions: u64, result: u64) {
    if !flag(result) {
        return equal::refuse_batch(address(batch));
    }
    let positions: *const i32 = core::ptr::with_exposed_provenance(address(positions));
    // SAFETY: the host's function has just read at least one position there.
    let position = unsafe { positions.read_unaligned() };
    equal::set_position(address(batch), int(index), position);
}

jumping! {
    /// A context ends.
    llama_free: |registers| equal::forget_context(address(registers.rdi)),
    /// What is computed next has outputs of its own.
    llama_decode: begin,
    /// The same.
    llama_encode: begin,
    /// Everything is an output from now on.
    llama_set_embeddings: |registers| if flag(registers.rsi) { refuse_context(registers) },
    /// The same, of the layer before the last.
    _Z26llama_set_embeddings_nextnP13llama_contextbb: |registers| if flag(registers.rsi) { refuse_context(registers) },
    /// The same, of any layer.
    _Z30llama_set_embeddings_layer_inpP13llama_contextjb: |registers| if flag(registers.rdx) { refuse_context(registers) },
    /// A batch ends.
    llama_batch_ext_free: |registers| equal::forget_batch(address(registers.rdi)),
    /// A batch is emptied.
    llama_batch_ext_clear: |registers| equal::clear_batch(address(registers.rdi)),
    /// An entry that is to be told what it is.
    llama_batch_ext_add: refuse_batch,
    /// An embedding.
    llama_batch_ext_add_embd: embed,
    /// A token of several sequences.
    llama_batch_ext_add_seq: refuse_batch,
    /// A token with an embedding.
    llama_batch_ext_set_embd_token: embed,
    /// The same.
    llama_batch_ext_set_embd_state: embed,
    /// A token that a head of decisions reads.
    _Z34llama_batch_ext_set_decision_orderP15llama_batch_exti20llama_decision_order: refuse_batch,
    /// An output by its index in the batch.
    llama_get_logits_ith: move_second,
    /// The same.
    llama_get_embeddings_ith: move_second,
    /// The same.
    llama_get_sampled_token_ith: move_second,
    /// The same.
    llama_get_sampled_probs_ith: move_second,
    /// The same.
    llama_get_sampled_probs_count_ith: move_second,
    /// The same.
    llama_get_sampled_logits_ith: move_second,
    /// The same.
    llama_get_sampled_logits_count_ith: move_second,
    /// The same.
    llama_get_sampled_candidates_ith: move_second,
    /// The same.
    llama_get_sampled_candidates_count_ith: move_second,
    /// The same. It calls those above, by way of us or not.
    llama_sampler_sample: |registers| move_index(registers.rsi, &mut registers.rdx),
}

calling! {
    /// A batch is made.
    llama_batch_ext_init: |context, _, _, batch| equal::add_batch(address(batch), address(context)),
    /// A token.
    llama_batch_ext_add_token: |batch, sequence, token, index| {
        equal::add_token(address(batch), int(sequence), int(token), int(index));
    },
    /// The position of an entry.
    llama_batch_ext_set_pos: set_position,
    /// Whether an entry is an output.
    llama_batch_ext_set_output_logits: set_output,
    /// The same.
    llama_batch_ext_set_output_embd: set_output,
}

/// A pointer of the host's that is only handed on.
type Pointer = *mut c_void;

macro_rules! functions {
    ($($name:ident: $type:ty,)*) => {
        /// The host's functions that are called here.
        pub(super) struct Functions {
            $($name: $type,)*
        }

        impl Functions {
            fn find() -> Option<Self> {
                Some(Self {$(
                    $name: {
                        let found = in_order(name_of!($name));
                        if found.is_null() {
                            return None;
                        }
                        // SAFETY: the exported function of this name has this type in the release whose parameters are known.
                        unsafe { transmute::<Pointer, $type>(found) }
                    },
                )*})
            }
        }
    };
}

functions! {
    llama_init_from_model: unsafe extern "C-unwind" fn(Pointer, Params) -> Pointer,
    llama_model_has_encoder: unsafe extern "C-unwind" fn(Pointer) -> bool,
    llama_get_memory: unsafe extern "C-unwind" fn(Pointer) -> Pointer,
    llama_get_causal_attn: unsafe extern "C-unwind" fn(Pointer) -> bool,
    llama_pooling_type: unsafe extern "C-unwind" fn(Pointer) -> c_int,
    llama_n_batch: unsafe extern "C-unwind" fn(Pointer) -> u32,
    llama_n_ubatch: unsafe extern "C-unwind" fn(Pointer) -> u32,
    llama_n_ctx: unsafe extern "C-unwind" fn(Pointer) -> u32,
    llama_n_ctx_seq: unsafe extern "C-unwind" fn(Pointer) -> u32,
    llama_n_seq_max: unsafe extern "C-unwind" fn(Pointer) -> u32,
    llama_memory_seq_pos_max: unsafe extern "C-unwind" fn(Pointer, i32) -> i32,
    llama_memory_seq_rm: unsafe extern "C-unwind" fn(Pointer, i32, i32, i32) -> bool,
    llama_batch_ext_init: unsafe extern "C-unwind" fn(Pointer) -> Pointer,
    llama_batch_ext_free: unsafe extern "C-unwind" fn(Pointer),
    llama_batch_ext_add_token: unsafe extern "C-unwind" fn(Pointer, i32, i32) -> i32,
    llama_batch_ext_set_pos: unsafe extern "C-unwind" fn(Pointer, i32, *const i32) -> bool,
    llama_batch_ext_set_output_logits: unsafe extern "C-unwind" fn(Pointer, i32, bool) -> bool,
    llama_process: unsafe extern "C-unwind" fn(Pointer, c_int, Pointer) -> c_int,
}

/// Functions that are only stood before: without one of them this is another release.
const OTHERS: [&CStr; 20] = [
    c"llama_batch_ext_clear",
    c"llama_batch_ext_add",
    c"llama_batch_ext_add_embd",
    c"llama_batch_ext_add_seq",
    c"llama_batch_ext_set_embd_token",
    c"llama_batch_ext_set_embd_state",
    c"llama_batch_ext_set_output_embd",
    c"_Z34llama_batch_ext_set_decision_orderP15llama_batch_exti20llama_decision_order",
    c"_Z26llama_set_embeddings_nextnP13llama_contextbb",
    c"_Z30llama_set_embeddings_layer_inpP13llama_contextjb",
    c"llama_get_logits_ith",
    c"llama_get_embeddings_ith",
    c"llama_get_sampled_token_ith",
    c"llama_get_sampled_probs_ith",
    c"llama_get_sampled_probs_count_ith",
    c"llama_get_sampled_logits_ith",
    c"llama_get_sampled_logits_count_ith",
    c"llama_get_sampled_candidates_ith",
    c"llama_get_sampled_candidates_count_ith",
    c"llama_sampler_sample",
];

/// The host's functions, if it has all that are needed and they are not ours.
pub(super) fn functions() -> Option<&'static Functions> {
    static FUNCTIONS: OnceLock<Option<Functions>> = OnceLock::new();
    let find = || OTHERS.iter().all(|name| !in_order(name).is_null()).then(Functions::find).flatten();
    FUNCTIONS.get_or_init(find).as_ref()
}

/// Parameters of a context, by value.
#[repr(C)]
struct Params([u64; CONTEXT_BYTES / 8]);

/// The function that a call of `llama_init_from_model` goes to, if the context is to be known: of the same type.
pub(super) fn making() -> *mut c_void {
    make_context as unsafe extern "C-unwind" fn(Pointer, Params) -> Pointer as *mut c_void
}

/// Makes a context and takes note of it.
unsafe extern "C-unwind" fn make_context(model: Pointer, params: Params) -> Pointer {
    let Some(host) = functions() else { return null_mut() };
    // SAFETY: what the caller passed.
    let context = unsafe { (host.llama_init_from_model)(model, params) };
    // SAFETY: a context, or null.
    if !context.is_null() && unsafe { suits(host, context, model) } {
        // SAFETY: a context.
        let micro_batch = unsafe { (host.llama_n_ubatch)(context) };
        contained(|| equal::add_context(context.addr(), micro_batch as usize));
    }
    context
}

/// Whether batches of a new context may be longer than its micro-batches and have outputs of single tokens only.
///
/// # Safety
/// `context` is one of `model`.
unsafe fn suits(host: &Functions, context: Pointer, model: Pointer) -> bool {
    // SAFETY: a context, as are the next.
    let batch = unsafe { (host.llama_n_batch)(context) };
    // SAFETY: as above.
    let micro_batch = unsafe { (host.llama_n_ubatch)(context) };
    // SAFETY: as above.
    let pooling = unsafe { (host.llama_pooling_type)(context) };
    // SAFETY: as above.
    let memory = unsafe { (host.llama_get_memory)(context) };
    // SAFETY: a model.
    let encodes = unsafe { (host.llama_model_has_encoder)(model) };
    batch > micro_batch && pooling == NO_POOLING && !memory.is_null() && !encodes
}

/// Has a batch computed: as it is, or in parts of equal length.
///
/// # Safety
/// Called as the function of this name is, by the host only.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn llama_process(context: u64, kind: u64, batch: u64, d: u64, e: u64, f: u64) -> u64 {
    static REAL: AtomicPtr<c_void> = AtomicPtr::new(null_mut());
    let mut parts = None;
    contained(|| {
        equal::begin(address(context));
        if int(kind) == DECODE {
            parts = equal::parts(address(context), address(batch));
        }
    });
    if let (Some((parts, micro_batch)), Some(host)) = (parts, functions()) {
        let context: Pointer = core::ptr::with_exposed_provenance_mut(address(context));
        // SAFETY: a context that is known, by its address.
        if let Some(result) = unsafe { host.process(context, &parts, micro_batch) } {
            return u64::from(result.cast_unsigned());
        }
    }
    let real = next(&REAL, c"llama_process");
    if real.is_null() {
        return 0;
    }
    // SAFETY: a function whose arguments and result are integers or pointers.
    let real = unsafe { transmute::<*mut c_void, Words>(real) };
    let before = graphs_with_experts();
    // SAFETY: what the caller passed.
    let result = unsafe { real(context, kind, batch, d, e, f) };
    contained(|| {
        if graphs_with_experts() != before {
            equal::note_help(address(context));
        }
    });
    result
}

/// Batches of ours.
struct Batches<'h> {
    host: &'h Functions,
    list: Vec<Pointer>,
}

impl Drop for Batches<'_> {
    fn drop(&mut self) {
        for &batch in &self.list {
            // SAFETY: made by `llama_batch_ext_init`, and used by nobody else.
            unsafe { (self.host.llama_batch_ext_free)(batch) };
        }
    }
}

impl Functions {
    /// Computes a batch in parts. `None` if it is to be computed as it is, and nothing was computed yet.
    ///
    /// # Safety
    /// `context` is a context of the host.
    unsafe fn process(&self, context: Pointer, parts: &Parts, micro_batch: usize) -> Option<c_int> {
        // SAFETY: a context.
        let memory = unsafe { (self.llama_get_memory)(context) };
        // SAFETY: a context and its memory.
        if !unsafe { self.has_room(context, memory, parts) } {
            return None;
        }
        // SAFETY: a context.
        let batches = unsafe { self.batches(context, parts) }?;
        let mut told = false;
        contained(|| {
            static TOLD: AtomicBool = AtomicBool::new(false);
            told = TOLD.swap(true, Ordering::Relaxed);
            if !told {
                log::info(&parts.line(micro_batch));
            }
        });
        for (number, &batch) in batches.list.iter().enumerate() {
            // SAFETY: a context and a batch of it.
            let result = unsafe { (self.llama_process)(context, DECODE, batch) };
            if result == NO_ROOM && number > 0 {
                // SAFETY: the context's memory. The host has then nothing of the batch in it, as it expects.
                unsafe { (self.llama_memory_seq_rm)(memory, parts.sequence, parts.position(), -1) };
            }
            if result != 0 {
                return Some(result);
            }
        }
        contained(|| equal::computed(context.addr(), parts.last()));
        Some(0)
    }

    /// Whether the memory has room for all parts, so that none is refused when others were computed. What sequences share is counted for each.
    ///
    /// # Safety
    /// `context` is a context and `memory` its memory.
    unsafe fn has_room(&self, context: Pointer, memory: Pointer, parts: &Parts) -> bool {
        // SAFETY: a context.
        if memory.is_null() || !unsafe { (self.llama_get_causal_attn)(context) } {
            return false;
        }
        // SAFETY: a context.
        let sequences = unsafe { (self.llama_n_seq_max)(context) };
        let used = |sequence: i32| {
            // SAFETY: a memory and one of its sequences.
            let last = unsafe { (self.llama_memory_seq_pos_max)(memory, sequence) };
            u64::try_from(last).map_or(0, |last| last + 1)
        };
        let all: u64 = (0..i32::try_from(sequences).unwrap_or(0)).map(used).sum();
        let tokens = parts.entries.len() as u64;
        let end = u64::try_from(parts.position()).map_or(u64::MAX, |position| position.saturating_add(tokens));
        // SAFETY: a context.
        let (room, own) = (unsafe { (self.llama_n_ctx)(context) }, unsafe { (self.llama_n_ctx_seq)(context) });
        all.saturating_add(tokens) <= room.into() && end <= own.into()
    }

    /// All parts as batches; `None` if the host refuses one.
    ///
    /// # Safety
    /// `context` is a context of the host.
    unsafe fn batches(&self, context: Pointer, parts: &Parts) -> Option<Batches<'_>> {
        let mut batches = Batches { host: self, list: Vec::new() };
        for entries in parts.entries.chunks(parts.length.max(1)) {
            // SAFETY: a context.
            let batch = unsafe { (self.llama_batch_ext_init)(context) };
            if batch.is_null() {
                return None;
            }
            batches.list.push(batch);
            for entry in entries {
                // SAFETY: a batch.
                let index = unsafe { (self.llama_batch_ext_add_token)(batch, parts.sequence, entry.token) };
                // SAFETY: a batch and a position. A token has one.
                let placed =
                    index >= 0 && unsafe { (self.llama_batch_ext_set_pos)(batch, index, &raw const entry.position) };
                // SAFETY: a batch.
                let set = placed
                    && (!entry.output || unsafe { (self.llama_batch_ext_set_output_logits)(batch, index, true) });
                if !set {
                    return None;
                }
            }
        }
        Some(batches)
    }
}
