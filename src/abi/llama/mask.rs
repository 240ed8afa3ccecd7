//! The mask of attention, which llama.cpp fills with one thread before a pass begins: that of a long pass is filled by several.
//!
//! Owns: the function that stands before the host's, the host's arguments cut to a part of the tokens, and the check that parts are what the whole is.
//! Invariants: every cell is written by the host's own function, from the host's own cells; it is `const`, so calls beside each other only read what
//! they share, and each writes the rows of its own tokens. A call that is not understood, or that comes before a check, is the host's alone. No exception
//! passes a frame of ours but from the host's call for the whole, where the host expects it.
//! Threads: the host's, and for one call others, which end before it returns. Does not: decide how many (`preload::masks` does).
#![cfg_attr(test, expect(non_snake_case, reason = "a name of the host's, which a test program does not export"))]

use core::ffi::{CStr, c_char, c_int, c_void};
use core::mem::transmute;
use core::ops::Range;
use core::ptr::null_mut;
use core::sync::atomic::AtomicPtr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Instant;

use super::super::gen_api3 as api3;
use super::{address, contained, equal, next};
use crate::backend::graphs_with_experts;
use crate::preload::masks::{self, Trust};
use crate::telemetry::log;

/// The host's function, as the compiler names it.
const NAME: &CStr = c"_ZNK14llama_kv_cache17set_input_kq_maskEP11ggml_tensorPK12llama_ubatchb";

/// A cache of the host's, a tensor, a part of a batch, and whether attention is causal.
type Fill = unsafe extern "C-unwind" fn(u64, u64, u64, u64);

unsafe extern "C" {
    fn ggml_moe_fill_mask(
        function: *const c_void,
        cache: *const c_void,
        mask: *mut c_void,
        tokens: *const c_void,
        causal: c_int,
        what: *mut c_char,
        room: usize,
    ) -> c_int;
}

/// The host's tokens of a pass (`llama_ubatch` of b11434). The function reads `tokens`, `sections`, `positions` and `sequences`.
#[derive(Clone, Copy)]
#[repr(C)]
struct Ubatch {
    equal: u32,
    tokens: u32,
    sequence_tokens: u32,
    sequence_sets: u32,
    sequences_used: u32,
    /// Positions of each token: all first ones, then all second ones, and so on.
    sections: u32,
    ids: *mut i32,
    embeddings: *mut f32,
    positions: *mut i32,
    sequence_counts: *mut i32,
    sequences: *mut *mut i32,
    rest: [*mut c_void; 5],
    /// A shared pointer to what the host made of it.
    owner: [*mut c_void; 2],
}

const _: () = assert!(size_of::<Ubatch>() == 120, "as tests/preload/masks.cpp has it");

/// What a check found.
enum Check {
    Equal,
    Differs,
    /// The host's function threw.
    Failed,
    Unclear,
}

/// A call of the host's function for the mask of one stream of causal attention.
struct Call {
    function: *const c_void,
    cache: *const c_void,
    mask: api3::ggml_tensor,
    batch: Ubatch,
    tokens: usize,
    row_bytes: usize,
}

// SAFETY: what it points to is the host's, which does nothing but wait for the call; the function reads it, and each thread writes other rows.
unsafe impl Sync for Call {}

impl Call {
    /// The call with these arguments; `None` if it is not one that is understood.
    ///
    /// # Safety
    /// The arguments of a call of the host's function, in a release whose types are known.
    unsafe fn of(function: *const c_void, cache: u64, mask: u64, batch: u64, causal: u64) -> Option<Self> {
        let mask: *const api3::ggml_tensor = core::ptr::with_exposed_provenance(address(mask));
        let batch: *const Ubatch = core::ptr::with_exposed_provenance(address(batch));
        if function.is_null() || causal & 0xff == 0 || mask.is_null() || batch.is_null() {
            return None;
        }
        // SAFETY: a tensor of the host.
        let mask = unsafe { mask.read() };
        // SAFETY: tokens of a pass of the host.
        let batch = unsafe { batch.read() };
        let cell_bytes = match mask.type_ {
            api3::GGML_TYPE_F16 => 2,
            api3::GGML_TYPE_F32 => 4,
            _ => return None,
        };
        let tokens = usize::try_from(batch.tokens).ok()?;
        let row_bytes = usize::try_from(mask.ne[0]).ok()?.checked_mul(cell_bytes)?;
        let dense = mask.nb[0] == cell_bytes && mask.nb[1] == row_bytes && !mask.data.is_null() && row_bytes > 0;
        let fits = mask.ne[1] == i64::from(batch.tokens) && mask.ne[2..] == [1, 1];
        let sequences = batch.sequence_tokens.checked_mul(batch.sequence_sets) == Some(batch.tokens)
            && (1..=batch.tokens).contains(&batch.sequences_used);
        let pointers = [batch.positions.addr(), batch.sequence_counts.addr(), batch.sequences.addr()];
        let placed = (1..=4).contains(&batch.sections)
            && batch.sequences.is_aligned()
            && pointers.iter().all(|at| *at != 0 && at.is_multiple_of(4));
        let cache = core::ptr::with_exposed_provenance(address(cache));
        (dense && fits && sequences && placed && tokens > 1).then_some(Self {
            function,
            cache,
            mask,
            batch,
            tokens,
            row_bytes,
        })
    }

    fn cells(&self) -> usize {
        usize::try_from(self.mask.ne[0]).unwrap_or(0)
    }

    /// The sequence of each token that its row is for. `None` where a token has none.
    fn sequences(&self) -> Option<Vec<i32>> {
        // SAFETY: as many as tokens, which was checked with parts of them.
        let lists = unsafe { core::slice::from_raw_parts(self.batch.sequences, self.tokens) };
        // SAFETY: the sequences of a token are one at least.
        lists.iter().map(|list| (!list.is_null()).then(|| unsafe { list.read() })).collect()
    }

    /// Calls the host's function for some of the tokens. Their rows are written where they belong, or to `elsewhere`. False if it threw.
    ///
    /// # Safety
    /// The tokens are some of the call's, no other thread writes their rows, and `elsewhere` has room for them.
    unsafe fn fill(&self, tokens: &Range<usize>, elsewhere: Option<*mut u8>) -> bool {
        let count = u32::try_from(tokens.len()).unwrap_or(0);
        let all = self.batch.sections as usize * self.tokens;
        // SAFETY: every section has a position for each token.
        let positions = unsafe { core::slice::from_raw_parts(self.batch.positions, all) };
        let mut positions = masks::positions(positions, self.tokens, tokens);
        let batch = Ubatch {
            tokens: count,
            sequence_tokens: count,
            sequence_sets: 1,
            positions: positions.as_mut_ptr(),
            ids: null_mut(),
            embeddings: null_mut(),
            sequence_counts: self.batch.sequence_counts.wrapping_add(tokens.start),
            sequences: self.batch.sequences.wrapping_add(tokens.start),
            ..self.batch
        };
        let mut mask = self.mask;
        mask.ne[1] = i64::from(count);
        (mask.nb[2], mask.nb[3]) = (self.row_bytes * tokens.len(), self.row_bytes * tokens.len());
        let rows = self.mask.data.cast::<u8>().wrapping_add(tokens.start * self.row_bytes);
        mask.data = elsewhere.unwrap_or(rows).cast();
        let mut what: [c_char; 128] = [0; 128];
        // SAFETY: the host's function with arguments of its types that live as long as the call.
        let returned = unsafe {
            ggml_moe_fill_mask(
                self.function,
                self.cache,
                (&raw mut mask).cast(),
                (&raw const batch).cast(),
                1,
                what.as_mut_ptr(),
                what.len(),
            )
        };
        returned != 0
    }

    /// Fills all of the mask by so many threads, this one among them. Returns how many there were; `None` if a part threw: then it is to be filled by
    /// the host.
    fn share(&self, threads: usize) -> Option<usize> {
        let part = masks::part(self.tokens, threads);
        let (next, failed) = (AtomicUsize::new(0), AtomicBool::new(false));
        let work = || {
            while !failed.load(Ordering::Relaxed) {
                let start = next.fetch_add(part, Ordering::Relaxed);
                if start >= self.tokens {
                    break;
                }
                // SAFETY: each part is taken once.
                if !unsafe { self.fill(&(start..(start + part).min(self.tokens)), None) } {
                    failed.store(true, Ordering::Relaxed);
                }
            }
        };
        let made = thread::scope(|scope| {
            let make =
                |_: &usize| thread::Builder::new().name("ggml-moe-mask".to_owned()).spawn_scoped(scope, work).is_ok();
            // Where the system gives no thread the others do its part.
            let made = (1..threads).take_while(make).count();
            work();
            made
        });
        (!failed.load(Ordering::Relaxed)).then_some(1 + made)
    }

    /// Whether parts have the rows that the whole has, which is filled.
    fn check(&self) -> Check {
        let mut rows: Vec<&[u8]> = Vec::new();
        for tokens in masks::samples(self.tokens) {
            let (mut own, bytes) = (Vec::new(), tokens.len() * self.row_bytes);
            if own.try_reserve_exact(bytes).is_err() {
                return Check::Unclear;
            }
            own.resize(bytes, 0x5a_u8);
            // SAFETY: some of the tokens, with room for their rows.
            if !unsafe { self.fill(&tokens, Some(own.as_mut_ptr())) } {
                return Check::Failed;
            }
            let first = self.mask.data.cast::<u8>().wrapping_add(tokens.start * self.row_bytes);
            // SAFETY: rows of the host's tensor, which it has filled and nobody writes now.
            let whole = unsafe { core::slice::from_raw_parts(first.cast_const(), own.len()) };
            if own != whole {
                return Check::Differs;
            }
            rows.extend(whole.chunks(self.row_bytes));
        }
        // Rows that are all alike show nothing.
        if rows.windows(2).any(|pair| pair[0] != pair[1]) { Check::Equal } else { Check::Unclear }
    }
}

/// Whether the host is the release whose types are known.
pub(crate) fn shares_masks() -> bool {
    equal::functions().is_some() && super::params::is_whole_context()
}

/// Parts are not what was expected of them: from now on there are none.
fn refuse(reason: &str) {
    masks::note_check(false);
    log::tell(&format!("llama.cpp fills the masks of long passes alone: {reason}"));
}

/// Fills the mask by several threads; false if the host is to do it.
fn share(call: &Call) -> bool {
    let Some(threads) = masks::threads(call.tokens, call.cells()) else { return false };
    if masks::trust() != Trust::Checked || graphs_with_experts() == 0 {
        return false;
    }
    let begun = Instant::now();
    if !call.sequences().is_some_and(|sequences| masks::pays(sequences.into_iter(), threads)) {
        return false;
    }
    let Some(threads) = call.share(threads) else {
        refuse("it failed for a part of a pass");
        return false;
    };
    static TOLD: AtomicBool = AtomicBool::new(false);
    if threads > 1 && !TOLD.swap(true, Ordering::Relaxed) {
        log::info(&format!(
            "the mask of a pass of {} tokens over {} cells was filled by {threads} threads in {:.1} ms; llama.cpp fills it by one (mask-threads)",
            call.tokens,
            call.cells(),
            begun.elapsed().as_secs_f64() * 1e3
        ));
    }
    true
}

/// Stands before `llama_kv_cache::set_input_kq_mask`.
///
/// # Safety
/// Called as the function of this name is, by the host only.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn _ZNK14llama_kv_cache17set_input_kq_maskEP11ggml_tensorPK12llama_ubatchb(
    cache: u64,
    mask: u64,
    batch: u64,
    causal: u64,
) {
    static REAL: AtomicPtr<c_void> = AtomicPtr::new(null_mut());
    let real = next(&REAL, NAME);
    let (mut call, mut filled) = (None, false);
    contained(|| {
        if masks::is_wanted() && masks::trust() != Trust::Refused && shares_masks() {
            // SAFETY: what the caller passed, in the known release.
            call = unsafe { Call::of(real, cache, mask, batch, causal) };
            filled = call.as_ref().is_some_and(share);
        }
    });
    if filled || real.is_null() {
        return;
    }
    // SAFETY: the function of this name has this type.
    let fill = unsafe { transmute::<*mut c_void, Fill>(real) };
    // SAFETY: what the caller passed.
    unsafe { fill(cache, mask, batch, causal) };
    contained(|| {
        if masks::trust() == Trust::Unknown
            && let Some(call) = call.as_ref()
        {
            match call.check() {
                Check::Unclear => {}
                Check::Equal => masks::note_check(true),
                Check::Differs => refuse("a part of a mask is not what it is in the whole"),
                Check::Failed => refuse("it failed for a part of a pass"),
            }
        }
    });
}
