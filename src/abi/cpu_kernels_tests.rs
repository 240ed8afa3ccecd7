//! Kernels in plain Rust for tests without a host, and what the lookup says.

use super::*;

unsafe extern "C" fn copy(source: *const f32, target: *mut c_void, count: i64) {
    // SAFETY: the contract of `Form::write`.
    unsafe { core::ptr::copy_nonoverlapping(source, target.cast(), usize::try_from(count).unwrap()) };
}

unsafe extern "C" fn dot_f32(
    n: c_int,
    product: *mut f32,
    _: usize,
    x: *const c_void,
    _: usize,
    y: *const c_void,
    _: usize,
    nrc: c_int,
) {
    assert_eq!(nrc, 1);
    let mut sum = 0.0;
    for index in 0..usize::try_from(n).unwrap() {
        let (x, y) = (x.cast::<f32>().wrapping_add(index), y.cast::<f32>().wrapping_add(index));
        // SAFETY: the contract of `Kernel::dot`.
        let x = unsafe { x.read() };
        // SAFETY: as above.
        sum += x * unsafe { y.read() };
    }
    // SAFETY: as above.
    unsafe { product.write(sum) };
}

unsafe extern "C" fn silu(n: c_int, y: *mut f32, x: *const f32) {
    for index in 0..usize::try_from(n).unwrap() {
        // SAFETY: the contract of the function.
        let value = unsafe { x.wrapping_add(index).read() };
        // SAFETY: as above.
        unsafe { y.wrapping_add(index).write(value / (1.0 + (-value).exp())) };
    }
}

unsafe extern "C" fn swiglu(n: c_int, y: *mut f32, x: *const f32, g: *const f32) {
    // SAFETY: the contract of the function.
    unsafe { silu(n, y, x) };
    for index in 0..usize::try_from(n).unwrap() {
        // SAFETY: as above.
        let factor = unsafe { g.wrapping_add(index).read() };
        let y = y.wrapping_add(index);
        // SAFETY: as above.
        let product = unsafe { y.read() } * factor;
        // SAFETY: as above.
        unsafe { y.write(product) };
    }
}

unsafe extern "C" fn from_halves(_: *const u16, _: *mut f32, _: i64) {}

/// Rows of plain floats that pretend to be packed in blocks of `block`.
pub(crate) fn plain(block: usize) -> Kernel {
    let form = Form { type_: u32::try_from(block).unwrap(), block, block_bytes: block * 4, from_float: copy };
    Kernel { block, block_bytes: block * 4, dot: dot_f32, form }
}

/// Functions of single values without tables.
pub(crate) fn plain_values() -> Values {
    let none = core::ptr::null();
    Values { silu, swiglu, from_halves, to_halves: copy, gelu: none, gelu_quick: none }
}

#[test]
fn every_missing_name_is_told() {
    let reason = CpuKernels::resolve(&|_| core::ptr::null_mut()).err().unwrap();
    assert!(reason.contains("ggml_get_type_traits_cpu, ggml_blck_size, ") && reason.contains("ggml_table_gelu_f16"));
    let all_but_one = |name: &CStr| {
        if name == c"ggml_vec_silu_f32" { core::ptr::null_mut() } else { core::ptr::dangling_mut::<c_void>() }
    };
    let reason = CpuKernels::resolve(&all_but_one).err().unwrap();
    assert_eq!(reason, "the host's CPU library does not export ggml_vec_silu_f32");
}

#[test]
fn erf_is_that_of_the_c_library() {
    assert_eq!(erf(0.0), 0.0);
    assert!((erf(0.5) - 0.520_499_9).abs() < 1e-6);
}
