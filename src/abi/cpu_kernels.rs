//! The kernels of ggml's CPU backend: products of rows, the form that activations take for them, and a few functions of single values.
//!
//! Owns: the host's functions of that library, looked up when first asked for, because the host may load the library after us.
//! Invariants: a [`Kernel`] exists only for a type that the host can multiply, with the form that its product wants.
//! Threads: any; everything is constant once found, and ggml's kernels keep no state.
//! Does not: start threads, allocate, or know what is multiplied with what.

use core::ffi::{CStr, c_int, c_void};
use std::sync::OnceLock;

use super::gen_api3 as api3;
use super::imports::{Present, host_symbol};

type Function<T> = <T as Present>::Function;

/// The host's functions, all of them or none.
#[derive(Clone, Copy)]
pub(crate) struct CpuKernels {
    traits: Function<api3::fn_ggml_get_type_traits_cpu>,
    block_size: Function<api3::fn_ggml_blck_size>,
    row_size: Function<api3::fn_ggml_row_size>,
    values: Values,
}

/// Functions of single values, over rows. They are the host's own where the host has them vectorised or in tables.
#[derive(Clone, Copy)]
pub(crate) struct Values {
    silu: Function<api3::fn_ggml_vec_silu_f32>,
    swiglu: Function<api3::fn_ggml_vec_swiglu_f32>,
    from_halves: Function<api3::fn_ggml_cpu_fp16_to_fp32>,
    to_halves: Function<api3::ggml_from_float_t>,
    gelu: *const u16,
    gelu_quick: *const u16,
}

// SAFETY: functions and constant tables of a library that stays loaded; the tables were filled by `ggml_cpu_init` before.
unsafe impl Send for Values {}
// SAFETY: as above.
unsafe impl Sync for Values {}

/// How a row of activations lies in memory for a product.
#[derive(Clone, Copy)]
pub(crate) struct Form {
    type_: u32,
    block: usize,
    block_bytes: usize,
    from_float: Function<api3::ggml_from_float_t>,
}

/// The product of a row of weights of one type with a row of activations.
#[derive(Clone, Copy)]
pub(crate) struct Kernel {
    block: usize,
    block_bytes: usize,
    dot: Function<api3::ggml_vec_dot_t>,
    /// What the row of activations must be.
    pub(crate) form: Form,
}

/// The kernels of this process's host. Err names what the host does not export.
pub(crate) fn cpu_kernels() -> Result<&'static CpuKernels, String> {
    static FOUND: OnceLock<CpuKernels> = OnceLock::new();
    if let Some(found) = FOUND.get() {
        return Ok(found);
    }
    let kernels = CpuKernels::resolve(&host_symbol)?;
    Ok(FOUND.get_or_init(|| kernels))
}

impl CpuKernels {
    fn resolve(lookup: &dyn Fn(&CStr) -> *mut c_void) -> Result<Self, String> {
        let mut missing = Vec::new();
        let mut find = |name: &'static CStr| {
            let address = lookup(name);
            if address.is_null() {
                missing.push(name.to_string_lossy());
            }
            address
        };
        let (traits, block_size) = (find(c"ggml_get_type_traits_cpu"), find(c"ggml_blck_size"));
        let (row_size, init) = (find(c"ggml_row_size"), find(c"ggml_cpu_init"));
        let (silu, swiglu) = (find(c"ggml_vec_silu_f32"), find(c"ggml_vec_swiglu_f32"));
        let from_halves = find(c"ggml_cpu_fp16_to_fp32");
        let (gelu, gelu_quick) = (find(c"ggml_table_gelu_f16"), find(c"ggml_table_gelu_quick_f16"));
        if !missing.is_empty() {
            return Err(format!("the host's CPU library does not export {}", missing.join(", ")));
        }
        // Fills the tables; a second call does nothing. The host's CPU backend has usually made the first one.
        // SAFETY: the address of the exported function of this name, whose type the conformance test checks.
        let init = unsafe { core::mem::transmute::<*mut c_void, Function<api3::fn_ggml_cpu_init>>(init) };
        // SAFETY: it takes nothing and is callable from any thread.
        unsafe { init() };
        // SAFETY: as for `init`.
        let traits =
            unsafe { core::mem::transmute::<*mut c_void, Function<api3::fn_ggml_get_type_traits_cpu>>(traits) };
        // SAFETY: every host has the type of halves, at this number (the probe checks it by name).
        let halves = unsafe { traits(api3::GGML_TYPE_F16) };
        // SAFETY: the host's table is constant, and this type has an entry.
        let Some(to_halves) = (unsafe { (*halves).from_float }) else {
            return Err("the host's CPU library cannot convert to halves".to_owned());
        };
        let values = Values {
            // SAFETY: as for `init`.
            silu: unsafe { core::mem::transmute::<*mut c_void, Function<api3::fn_ggml_vec_silu_f32>>(silu) },
            // SAFETY: as for `init`.
            swiglu: unsafe { core::mem::transmute::<*mut c_void, Function<api3::fn_ggml_vec_swiglu_f32>>(swiglu) },
            // SAFETY: as for `init`.
            from_halves: unsafe {
                core::mem::transmute::<*mut c_void, Function<api3::fn_ggml_cpu_fp16_to_fp32>>(from_halves)
            },
            to_halves,
            gelu: gelu.cast_const().cast(),
            gelu_quick: gelu_quick.cast_const().cast(),
        };
        Ok(Self {
            traits,
            // SAFETY: as for `init`.
            block_size: unsafe { core::mem::transmute::<*mut c_void, Function<api3::fn_ggml_blck_size>>(block_size) },
            // SAFETY: as for `init`.
            row_size: unsafe { core::mem::transmute::<*mut c_void, Function<api3::fn_ggml_row_size>>(row_size) },
            values,
        })
    }

    /// The product for weights of a type of the host's tensors; none where the host has none.
    pub(crate) fn kernel(&self, type_: u32) -> Option<Kernel> {
        let (block, block_bytes) = self.block(type_)?;
        // SAFETY: `block` has found the number among the host's types.
        let traits = unsafe { (self.traits)(type_) };
        // SAFETY: the host's table is constant and has an entry for each of its types.
        let api3::ggml_type_traits_cpu { vec_dot, vec_dot_type, .. } = unsafe { traits.read() };
        let dot = vec_dot?;
        Some(Kernel { block, block_bytes, dot, form: self.form(vec_dot_type)? })
    }

    fn form(&self, type_: u32) -> Option<Form> {
        let (block, block_bytes) = self.block(type_)?;
        // SAFETY: `block` has found the number among the host's types.
        let traits = unsafe { (self.traits)(type_) };
        // SAFETY: as in `kernel`.
        let from_float = unsafe { (*traits).from_float }?;
        Some(Form { type_, block, block_bytes, from_float })
    }

    /// Values and bytes of a block of this type, if the number is one of the host's types that this layout knows.
    fn block(&self, type_: u32) -> Option<(usize, usize)> {
        if type_ >= api3::GGML_TYPE_COUNT {
            return None;
        }
        // SAFETY: a pure function of ggml; the type came from a tensor of the host.
        let block = unsafe { (self.block_size)(type_) };
        if block <= 0 {
            return None;
        }
        // SAFETY: as above; a row of one block.
        let bytes = unsafe { (self.row_size)(type_, block) };
        Some((usize::try_from(block).ok()?, bytes)).filter(|&(_, bytes)| bytes > 0)
    }

    /// The functions of single values.
    pub(crate) fn values(&self) -> Values {
        self.values
    }
}

impl Form {
    /// Values that are packed together: rows and parts of rows are multiples of it.
    pub(crate) fn block(&self) -> usize {
        self.block
    }

    /// Bytes of `count` values, a multiple of the block.
    pub(crate) fn bytes(&self, count: usize) -> usize {
        count / self.block * self.block_bytes
    }

    /// Whether two products can share a row.
    pub(crate) fn is(&self, other: &Self) -> bool {
        self.type_ == other.type_
    }

    /// Writes `count` values, a multiple of the block, in this form.
    ///
    /// # Safety
    /// `source` holds `count` values, `target` has room for [`Form::bytes`] of them, and nobody else uses the target meanwhile.
    pub(crate) unsafe fn write(&self, source: *const f32, target: *mut u8, count: usize) {
        debug_assert!(count.is_multiple_of(self.block));
        // SAFETY: ranges and count are the caller's contract.
        unsafe { (self.from_float)(source, target.cast(), i64::try_from(count).unwrap_or(0)) };
    }
}

impl Kernel {
    /// Values that the weights pack together.
    pub(crate) fn block(&self) -> usize {
        self.block
    }

    /// Bytes of a row of weights of `count` values, a multiple of the block.
    pub(crate) fn bytes(&self, count: usize) -> usize {
        count / self.block * self.block_bytes
    }

    /// The product of two rows of `count` values.
    ///
    /// # Safety
    /// `weights` holds [`Kernel::bytes`] and `activations` as many bytes as the form says, of `count` values, a multiple of both blocks.
    pub(crate) unsafe fn dot(&self, weights: *const u8, activations: *const u8, count: usize) -> f32 {
        let mut product = 0.0;
        let n = c_int::try_from(count).unwrap_or(0);
        // SAFETY: the ranges are the caller's contract; strides are not looked at for one row.
        unsafe { (self.dot)(n, &raw mut product, 0, weights.cast(), 0, activations.cast(), 0, 1) };
        product
    }
}

/// Length of a row as C takes it; rows of a model are far shorter than the limit.
fn length(row: &[f32]) -> c_int {
    c_int::try_from(row.len()).unwrap_or(0)
}

impl Values {
    /// x / (1 + exp(-x)), in place, as the host computes it.
    pub(crate) fn silu(&self, row: &mut [f32]) {
        // SAFETY: source and target are the same row of that length; each value depends on its own place only.
        unsafe { (self.silu)(length(row), row.as_mut_ptr(), row.as_ptr()) };
    }

    /// silu of `row`, times `factors`, in place.
    pub(crate) fn swiglu(&self, row: &mut [f32], factors: &[f32]) {
        let count = length(row).min(length(factors));
        // SAFETY: both rows hold `count` values; each value depends on its own place only.
        unsafe { (self.swiglu)(count, row.as_mut_ptr(), row.as_ptr(), factors.as_ptr()) };
    }

    /// What the host does for GELU: its table between -10 and 10, and 0 or the value beyond; times `factors` where there are some.
    pub(crate) fn gelu(&self, row: &mut [f32], factors: Option<&[f32]>) {
        self.table(self.gelu, row, |place, value, entry| {
            let found = if value >= 10.0 { value } else { entry };
            if value <= -10.0 { 0.0 } else { factors.map_or(found, |factors| found * factors[place]) }
        });
    }

    /// The host's table of quick GELU, everywhere, in the same way.
    pub(crate) fn gelu_quick(&self, row: &mut [f32], factors: Option<&[f32]>) {
        self.table(self.gelu_quick, row, |place, _, entry| factors.map_or(entry, |factors| entry * factors[place]));
    }

    /// Replaces each value by what `choose` makes of its place, itself and the table's entry for its half.
    fn table(&self, table: *const u16, row: &mut [f32], choose: impl Fn(usize, f32, f32) -> f32) {
        const PART: usize = 64;
        let (mut halves, mut found) = ([0_u16; PART], [0.0_f32; PART]);
        for (first, part) in row.chunks_mut(PART).enumerate() {
            let count = i64::try_from(part.len()).unwrap_or(0);
            // SAFETY: `part` holds `count` values and `halves` at least as many.
            unsafe { (self.to_halves)(part.as_ptr(), halves.as_mut_ptr().cast(), count) };
            for half in &mut halves[..part.len()] {
                // SAFETY: the table has an entry for each of the 65,536 halves.
                let entry = unsafe { table.add(usize::from(*half)) };
                // SAFETY: as above; the table is constant.
                *half = unsafe { entry.read() };
            }
            // SAFETY: `halves` and `found` hold at least `count` values.
            unsafe { (self.from_halves)(halves.as_ptr(), found.as_mut_ptr(), count) };
            for (place, (value, &found)) in part.iter_mut().zip(&found).enumerate() {
                *value = choose(first * PART + place, *value, found);
            }
        }
    }
}

/// The error function of the C library, which the host uses.
pub(crate) fn erf(value: f32) -> f32 {
    // Every program with Rust's library has the C library's mathematics.
    unsafe extern "C" {
        safe fn erff(value: f32) -> f32;
    }
    erff(value)
}

#[cfg(test)]
#[path = "cpu_kernels_tests.rs"]
pub(crate) mod tests;
