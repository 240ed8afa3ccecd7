//! Stock test-backend-ops on our device: the operations of MoE layers, attention and the cache, each case against ggml's
//! reference code. `make test-full` runs all operations.

use std::time::Duration;

use crate::support::process::run;
use crate::support::stock::{Side, program};

/// Runs the cases of one operation whose parameters match; panics unless at least `at_least` ran and all passed.
fn operation(name: &str, parameters: &str, at_least: u32) {
    let side = Side::Plugin { keys: "inner=CPU", device: "MoE0" };
    let mut command = program("test-backend-ops", side);
    command.args(["test", "-b", "MoE0", "-o", name, "-p", parameters, "-j", "2"]);
    let finished = run(&mut command, Duration::from_secs(240)).success();
    let passed = finished.stdout.lines().find_map(|line| line.trim().strip_suffix(" tests passed")?.split_once('/'));
    let Some((passed, total)) = passed else { panic!("{}", finished.report("no count of tests")) };
    assert_eq!(passed, total, "{}", finished.report("not all passed"));
    let count: u32 = passed.parse().expect("a count");
    assert!(count >= at_least, "only {count} cases ran on MoE0; the filter or supports_op is wrong");
}

#[test]
fn mul_mat() {
    operation("MUL_MAT", r"m=16,n=(1|9|16),k=(256|1024),bs=\[(1,1|2,3|3,2)\]", 340);
}

#[test]
fn mul_mat_id() {
    operation("MUL_MAT_ID", r"n_mats=(4|8),n_used=2,b=[01],m=(64|512),n=(1|16|17),", 130);
}

#[test]
fn add_id() {
    operation("ADD_ID", ".", 30);
}

#[test]
fn get_rows() {
    // Without the tables of 80,000 rows, which take longer to fill than all others together; `make test-full` has them.
    operation("GET_ROWS", r"m=\d{1,4},", 200);
}

#[test]
fn set_rows() {
    operation("SET_ROWS", ".", 500);
}

#[test]
fn copy() {
    operation("CPY", ".", 400);
}

#[test]
fn flash_attention() {
    operation(
        "FLASH_ATTN_EXT",
        r"hsk=(64|128|576),.*kv=(113|512),nb=(1|32),.*max_bias=0.0.*type_K=(f16|q8_0|q4_0),",
        200,
    );
}
