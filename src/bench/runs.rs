//! Kept runs: one JSON object a line.
//!
//! Owns: the line of a run and the table of all of them. A line that is not understood is counted, not fatal.
//! Threads: none. Does not: touch the file.

use serde_json::Value;

use super::report::{Report, columns};

/// The line that is appended for a run.
pub fn line(report: &Report) -> String {
    format!("{}\n", report.json())
}

/// The table of kept runs, and how many lines are none.
pub fn table(text: &str) -> (String, usize) {
    let mut rows = vec![
        [
            "date",
            "machine",
            "model",
            "share",
            "cache MiB",
            "stock's flags",
            "test",
            "stock t/s",
            "ours t/s",
            "ratio",
            "hits",
        ]
        .map(str::to_owned)
        .to_vec(),
    ];
    let mut broken = 0;
    for line in text.lines().filter(|line| !line.trim().is_empty()) {
        let run: Option<Value> = serde_json::from_str(line).ok();
        match run.as_ref().and_then(|run| Some((run, run["cases"].as_array()?))) {
            Some((run, cases)) => {
                cases.iter().for_each(|case| add(&mut rows, run, case));
                run["prompt_tables"]
                    .as_array()
                    .into_iter()
                    .flatten()
                    .for_each(|table| add_prompts(&mut rows, run, table));
            }
            None => broken += 1,
        }
    }
    (columns(&rows), broken)
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or("?").chars().take(40).collect()
}

fn number(value: &Value, places: usize) -> String {
    value.as_f64().map_or("-".to_owned(), |number| format!("{number:.places$}"))
}

fn machine(run: &Value) -> &Value {
    let machine = &run["machine"];
    if machine["gpu"].as_str().is_some_and(|gpu| !gpu.is_empty()) { &machine["gpu"] } else { &machine["cpu"] }
}

fn share(case: &Value) -> String {
    case["share"].as_f64().map_or("?".to_owned(), |share| format!("{:.0}%", 100.0 * share))
}

/// The rows of a table of prompts: ours against stock's best at the same memory.
fn add_prompts(rows: &mut Vec<Vec<String>>, run: &Value, table: &Value) {
    for row in table["prompts"].as_array().into_iter().flatten() {
        let (ours, equal) = (&row["best"]["ours"], &row["best"]["equal"]);
        rows.push(vec![
            text(&run["date"]),
            text(machine(run)),
            text(&run["model"]["file"]),
            share(table),
            table["cache_mib"].to_string(),
            format!("{} -ub {}", text(&equal["arguments"]), equal["ubatch"]),
            format!("pp{}/{}", row["prompt"], ours["ubatch"]),
            number(&equal["rate"], 1),
            number(&ours["rate"], 1),
            if equal["ratio"].is_null() { "void".to_owned() } else { format!("{}x", number(&equal["ratio"], 2)) },
            "-".to_owned(),
        ]);
    }
}

fn add(rows: &mut Vec<Vec<String>>, run: &Value, case: &Value) {
    for phase in case["phases"].as_array().into_iter().flatten() {
        for test in phase["tests"].as_array().into_iter().flatten() {
            let ratio = &test["ratio"];
            rows.push(vec![
                text(&run["date"]),
                text(machine(run)),
                text(&run["model"]["file"]),
                share(case),
                case["cache_mib"].to_string(),
                text(&phase["stock_arguments"]),
                text(&test["name"]),
                number(&test["stock"][0], 1),
                number(&test["ours"][0], 1),
                if ratio.is_null() {
                    "void".to_owned()
                } else {
                    format!("{}x ({} to {})", number(&ratio[0], 2), number(&ratio[1], 2), number(&ratio[2], 2))
                },
                phase["hit_percent"].as_f64().map_or("-".to_owned(), |percent| format!("{percent:.1}%")),
            ]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::report::tests::report;
    use super::*;

    #[test]
    fn kept_runs_are_listed() {
        let mut void = report();
        void.cases[0].phases[1].void = Some("x".into());
        let text = format!("{}{}broken\n{{}}\n\n", line(&report()), line(&void));
        assert_eq!(line(&report()).lines().count(), 1);
        let (table, broken) = table(&text);
        assert_eq!((table.lines().count(), broken), (7, 2), "{table}");
        let row = table.lines().nth(3).unwrap();
        for part in ["2026-11-30T12:00:00Z", "m.gguf", "20%", "-ncmoe 39", "tg128", "2.00x (1.80 to 2.20)", "75.0%"] {
            assert!(row.contains(part), "{part} in {row}");
        }
        assert!(table.lines().nth(6).unwrap().contains("void"));
        let prompts =
            Report { cases: Vec::new(), prompt_tables: vec![super::super::prompts::tests::table()], ..report() };
        let (table, broken) = super::table(&line(&prompts));
        assert_eq!((table.lines().count(), broken), (3, 0), "{table}");
        assert!(
            table.contains("pp12288/12288") && table.contains("-ncmoe 32 -ub 4096") && table.contains("1.38x"),
            "{table}"
        );
    }
}
