//! Op numbers, by name.
//!
//! Op numbers move between releases (75 of 91 changed within a year), so they are looked up by the host's own names at start.
//! Owns: the class of every op number that the planner cares about.
//! Does not: trust a number of the header set.

use core::ffi::CStr;

use crate::graph::slices::Work;

/// What the planner and the placement rules need to know of an op.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OpClass {
    /// No work: a leaf or a change of view. Always supported, whatever the memory.
    View,
    /// `MUL_MAT_ID`.
    ExpertProduct,
    /// Works row by row, so it may stand between the products of a block.
    PairWise,
    /// Anything else.
    Other,
}

/// The classes of the host's ops.
#[derive(Debug)]
pub(crate) struct Ops {
    classes: Vec<OpClass>,
    works: Vec<Work>,
    pub(super) none: u32,
    /// Picks rows of a table; absent if the host has no such op.
    pub(super) get_rows: Option<u32>,
}

/// Name, class, and whether a host without it is refused.
const TABLE: &[(&CStr, OpClass, bool)] = &[
    (c"NONE", OpClass::View, true),
    (c"RESHAPE", OpClass::View, true),
    (c"VIEW", OpClass::View, true),
    (c"PERMUTE", OpClass::View, true),
    (c"TRANSPOSE", OpClass::View, true),
    (c"MUL_MAT_ID", OpClass::ExpertProduct, true),
    (c"ADD", OpClass::PairWise, true),
    (c"MUL", OpClass::PairWise, true),
    (c"SCALE", OpClass::PairWise, true),
    (c"UNARY", OpClass::PairWise, true),
    (c"ADD_ID", OpClass::PairWise, false),
    (c"SUB", OpClass::PairWise, false),
    (c"DIV", OpClass::PairWise, false),
    (c"SQR", OpClass::PairWise, false),
    (c"SQRT", OpClass::PairWise, false),
    (c"CLAMP", OpClass::PairWise, false),
    (c"REPEAT", OpClass::PairWise, false),
    (c"GET_ROWS", OpClass::PairWise, false),
    (c"PAD", OpClass::PairWise, false),
    (c"CONT", OpClass::PairWise, false),
    (c"GLU", OpClass::PairWise, false),
];

/// Ops whose results for a token come from that token's rows alone. What changes the number or the order of rows is none of them.
const ELEMENTS: &[&CStr] =
    &[c"ADD", c"SUB", c"MUL", c"DIV", c"SCALE", c"UNARY", c"SQR", c"SQRT", c"CLAMP", c"CONT", c"GLU"];

fn work(name: &CStr, class: OpClass) -> Work {
    match class {
        OpClass::View => Work::View,
        OpClass::ExpertProduct => Work::Product,
        OpClass::PairWise if name == c"ADD_ID" => Work::AddId,
        OpClass::PairWise if ELEMENTS.contains(&name) => Work::Elements,
        OpClass::PairWise | OpClass::Other => Work::Other,
    }
}

/// No release has had more ops than this; a scan ends here at the latest.
const MOST_OPS: u32 = 256;

impl Ops {
    /// Reads the host's op names upwards from 0 until every name of the table is found or the names end.
    ///
    /// `name` must accept every number up to the last op; the scan stops at `GLU`, which has been the last op since it exists,
    /// so that no number behind the host's table is asked for.
    pub(super) fn resolve(name: &dyn Fn(u32) -> Option<&'static CStr>) -> Result<Self, String> {
        let (mut classes, mut works) = (Vec::new(), Vec::new());
        let (mut none, mut get_rows) = (None, None);
        let mut found = vec![false; TABLE.len()];
        for number in 0..MOST_OPS {
            let Some(text) = name(number) else { break };
            let entry = TABLE.iter().position(|(known, _, _)| *known == text);
            let class = entry.map_or(OpClass::Other, |entry| TABLE[entry].1);
            classes.push(class);
            works.push(work(text, class));
            if let Some(entry) = entry {
                found[entry] = true;
            }
            if text == c"NONE" {
                none = Some(number);
            }
            if text == c"GET_ROWS" {
                get_rows = Some(number);
            }
            if text == c"GLU" {
                break;
            }
        }
        let missing: Vec<_> = TABLE
            .iter()
            .zip(&found)
            .filter(|((_, _, required), found)| *required && !**found)
            .map(|((name, _, _), _)| name.to_string_lossy())
            .collect();
        match none {
            Some(none) if missing.is_empty() => Ok(Self { classes, works, none, get_rows }),
            _ => Err(missing.join(", ")),
        }
    }

    /// What an op does to the rows of its sources.
    pub(crate) fn work(&self, op: u32) -> Work {
        usize::try_from(op).ok().and_then(|op| self.works.get(op)).copied().unwrap_or(Work::Other)
    }

    /// The class of an op number.
    pub(crate) fn class(&self, op: u32) -> OpClass {
        usize::try_from(op).ok().and_then(|op| self.classes.get(op)).copied().unwrap_or(OpClass::Other)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_follow_the_names() {
        let names = [
            c"NONE",
            c"GLU_BACK",
            c"MUL_MAT_ID",
            c"RESHAPE",
            c"VIEW",
            c"PERMUTE",
            c"TRANSPOSE",
            c"ADD",
            c"MUL",
            c"SCALE",
            c"UNARY",
            c"GLU",
        ];
        let ops = Ops::resolve(&|number| names.get(number as usize).copied()).unwrap();
        assert_eq!(ops.none, 0);
        assert_eq!(ops.class(2), OpClass::ExpertProduct);
        assert_eq!(ops.class(1), OpClass::Other);
        assert_eq!(ops.class(11), OpClass::PairWise);
        assert_eq!(ops.class(12), OpClass::Other);
    }

    #[test]
    fn the_scan_ends_at_the_last_op() {
        let ops = Ops::resolve(&|number| {
            assert!(number <= 10, "asked behind the table");
            Some(
                [
                    c"NONE",
                    c"MUL_MAT_ID",
                    c"RESHAPE",
                    c"VIEW",
                    c"PERMUTE",
                    c"TRANSPOSE",
                    c"ADD",
                    c"MUL",
                    c"SCALE",
                    c"UNARY",
                    c"GLU",
                ][number as usize],
            )
        });
        assert!(ops.is_ok());
    }

    #[test]
    fn missing_ops_are_all_listed() {
        let error = Ops::resolve(&|number| (number == 0).then_some(c"NONE")).unwrap_err();
        assert_eq!(error, "RESHAPE, VIEW, PERMUTE, TRANSPOSE, MUL_MAT_ID, ADD, MUL, SCALE, UNARY");
    }
}
