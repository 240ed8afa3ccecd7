//! JSON as far as the counters need it: one object after another is written, and the command reads them.
//!
//! Owns: the writer ([`Object`], [`list`]) and a reader that refuses what is nested too deeply.
//! Invariants: what is written is valid JSON on one line, whatever a name in it holds; the reader never panics.
//! Threads: none. Does not: know what is in it.

use std::fmt::Write as _;

/// An object that is being written.
#[derive(Debug)]
pub struct Object(String);

impl Object {
    /// An object without members.
    #[expect(clippy::new_without_default, reason = "an object is begun on purpose")]
    pub fn new() -> Self {
        Self(String::from("{"))
    }

    fn name(&mut self, name: &str) -> &mut String {
        if self.0.len() > 1 {
            self.0.push(',');
        }
        self.0.push_str(&quoted(name));
        self.0.push(':');
        &mut self.0
    }

    /// A whole number.
    pub fn number(&mut self, name: &str, value: u64) -> &mut Self {
        // Writing to a String cannot fail.
        let _ = write!(self.name(name), "{value}");
        self
    }

    /// A number with so many decimals; `null` if it is none.
    pub fn real(&mut self, name: &str, value: Option<f64>, decimals: usize) -> &mut Self {
        let out = self.name(name);
        match value.filter(|value| value.is_finite()) {
            Some(value) => {
                // Writing to a String cannot fail.
                let _ = write!(out, "{value:.decimals$}");
            }
            None => out.push_str("null"),
        }
        self
    }

    /// A text.
    pub fn text(&mut self, name: &str, value: &str) -> &mut Self {
        let value = quoted(value);
        self.name(name).push_str(&value);
        self
    }

    /// True or false.
    pub fn flag(&mut self, name: &str, value: bool) -> &mut Self {
        self.name(name).push_str(if value { "true" } else { "false" });
        self
    }

    /// A value that is JSON already; `null` if there is none.
    pub fn value(&mut self, name: &str, json: Option<&str>) -> &mut Self {
        self.name(name).push_str(json.unwrap_or("null"));
        self
    }

    /// The whole object.
    pub fn end(mut self) -> String {
        self.0.push('}');
        self.0
    }
}

/// A list of values that are JSON already.
pub fn list(values: impl IntoIterator<Item = String>) -> String {
    let values: Vec<String> = values.into_iter().collect();
    format!("[{}]", values.join(","))
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

/// A value that was read.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// `null`.
    Null,
    /// `true` or `false`.
    Flag(bool),
    /// Any number.
    Number(f64),
    /// A text.
    Text(String),
    /// A list.
    List(Vec<Value>),
    /// Members in their order.
    Object(Vec<(String, Value)>),
}

/// What a member that is not there is.
static NULL: Value = Value::Null;
/// Lists and objects within each other.
const DEEPEST: usize = 32;

impl Value {
    /// Reads one value; `None` if the text is anything else.
    pub fn read(text: &str) -> Option<Self> {
        let mut reader = Reader { rest: text };
        let value = reader.value(0)?;
        reader.space();
        reader.rest.is_empty().then_some(value)
    }

    /// A member of an object; `Null` if there is none.
    pub fn get(&self, name: &str) -> &Self {
        let Self::Object(members) = self else { return &NULL };
        members.iter().find(|(own, _)| own == name).map_or(&NULL, |(_, value)| value)
    }

    /// The items of a list; none of anything else.
    pub fn items(&self) -> &[Self] {
        if let Self::List(items) = self { items } else { &[] }
    }

    /// The number.
    pub fn number(&self) -> Option<f64> {
        if let Self::Number(number) = self { Some(*number) } else { None }
    }

    /// The text; empty for anything else.
    pub fn text(&self) -> &str {
        if let Self::Text(text) = self { text } else { "" }
    }
}

struct Reader<'t> {
    rest: &'t str,
}

impl Reader<'_> {
    fn space(&mut self) {
        self.rest = self.rest.trim_start_matches([' ', '\t', '\n', '\r']);
    }

    fn take(&mut self, token: &str) -> Option<()> {
        self.space();
        self.rest = self.rest.strip_prefix(token)?;
        Some(())
    }

    fn next(&mut self) -> Option<char> {
        let c = self.rest.chars().next()?;
        self.rest = &self.rest[c.len_utf8()..];
        Some(c)
    }

    fn value(&mut self, depth: usize) -> Option<Value> {
        self.space();
        match self.rest.as_bytes().first()? {
            b'{' | b'[' if depth >= DEEPEST => None,
            b'{' => {
                self.take("{")?;
                let mut members = Vec::new();
                self.sequence("}", |reader| {
                    reader.space();
                    let name = reader.string()?;
                    reader.take(":")?;
                    members.push((name, reader.value(depth + 1)?));
                    Some(())
                })?;
                Some(Value::Object(members))
            }
            b'[' => {
                self.take("[")?;
                let mut items = Vec::new();
                self.sequence("]", |reader| {
                    items.push(reader.value(depth + 1)?);
                    Some(())
                })?;
                Some(Value::List(items))
            }
            b'"' => self.string().map(Value::Text),
            b't' => self.take("true").map(|()| Value::Flag(true)),
            b'f' => self.take("false").map(|()| Value::Flag(false)),
            b'n' => self.take("null").map(|()| Value::Null),
            _ => self.number(),
        }
    }

    fn sequence(&mut self, end: &str, mut item: impl FnMut(&mut Self) -> Option<()>) -> Option<()> {
        if self.take(end).is_some() {
            return Some(());
        }
        loop {
            item(self)?;
            if self.take(end).is_some() {
                return Some(());
            }
            self.take(",")?;
        }
    }

    fn string(&mut self) -> Option<String> {
        self.rest = self.rest.strip_prefix('"')?;
        let mut out = String::new();
        loop {
            match self.next()? {
                '"' => return Some(out),
                '\\' => out.push(self.escaped()?),
                c if c < ' ' => return None,
                c => out.push(c),
            }
        }
    }

    fn escaped(&mut self) -> Option<char> {
        Some(match self.next()? {
            'n' => '\n',
            't' => '\t',
            'r' => '\r',
            'b' => '\u{8}',
            'f' => '\u{c}',
            'u' => {
                let high = self.hex()?;
                if !(0xd800..0xdc00).contains(&high) {
                    return char::from_u32(high);
                }
                self.rest = self.rest.strip_prefix("\\u")?;
                let low = self.hex()?.checked_sub(0xdc00).filter(|low| *low < 0x400)?;
                char::from_u32(0x10000 + ((high - 0xd800) << 10) + low)?
            }
            c @ ('"' | '\\' | '/') => c,
            _ => return None,
        })
    }

    fn hex(&mut self) -> Option<u32> {
        let (digits, rest) = self.rest.split_at_checked(4)?;
        self.rest = rest;
        digits.bytes().all(|digit| digit.is_ascii_hexdigit()).then(|| u32::from_str_radix(digits, 16).ok())?
    }

    fn number(&mut self) -> Option<Value> {
        let end = self.rest.find(|c: char| !matches!(c, '0'..='9' | '+' | '-' | '.' | 'e' | 'E'));
        let (digits, rest) = self.rest.split_at(end.unwrap_or(self.rest.len()));
        self.rest = rest;
        digits.parse().ok().filter(|number: &f64| number.is_finite()).map(Value::Number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn same(ours: &Value, theirs: &serde_json::Value) -> bool {
        use serde_json::Value as Theirs;
        match (ours, theirs) {
            (Value::Null, Theirs::Null) => true,
            (Value::Flag(one), Theirs::Bool(other)) => one == other,
            (Value::Number(one), Theirs::Number(other)) => other.as_f64() == Some(*one),
            (Value::Text(one), Theirs::String(other)) => one == other,
            (Value::List(one), Theirs::Array(other)) => {
                one.len() == other.len() && one.iter().zip(other).all(|(one, other)| same(one, other))
            }
            (Value::Object(one), Theirs::Object(other)) => one.iter().all(|(name, value)| same(value, &other[name])),
            _ => false,
        }
    }

    #[test]
    fn what_is_written_is_read_back() {
        let mut inner = Object::new();
        inner.flag("yes", true).real("half", Some(0.5), 3).real("none", None, 1).real("odd", Some(f64::NAN), 1);
        let inner = inner.end();
        let mut object = Object::new();
        object.text("na\"me", "a\\\u{1}é\u{1f600}").number("big", 1 << 50).value("inner", Some(&inner));
        object.value("list", Some(&list(["1".to_owned(), "[]".to_owned()]))).value("missing", None);
        let text = object.end();
        let value = Value::read(&text).unwrap();
        assert!(same(&value, &serde_json::from_str(&text).unwrap()), "{text}");
        assert_eq!(value.get("na\"me").text(), "a\\\u{1}é\u{1f600}");
        assert_eq!(value.get("inner").get("half").number(), Some(0.5));
        assert_eq!(value.get("list").items().len(), 2);
        assert_eq!(*value.get("nobody").get("at all"), Value::Null);
        assert_eq!(Object::new().end(), "{}");
    }

    #[test]
    fn what_is_no_json_is_refused() {
        for text in
            ["", "{", "[1", "{\"a\"}", "\"\\x\"", "\"\\ud800\"", "tru", "1 2", "--", "\"a\nb\"", "{1:2}", "[1,]"]
        {
            assert_eq!(Value::read(text), None, "{text}");
        }
        assert_eq!(Value::read(&"[".repeat(100_000)), None, "nesting is bounded");
        assert_eq!(Value::read("\"\\ud83d\\ude00\""), Some(Value::Text("\u{1f600}".to_owned())));
    }

    proptest! {
        #[test]
        fn texts_survive(text in ".{0,40}") {
            let mut object = Object::new();
            object.text("text", &text);
            let json = object.end();
            prop_assert!(!json.contains('\n'));
            let value = Value::read(&json);
            prop_assert_eq!(value.as_ref().map(|value| value.get("text").text()), Some(text.as_str()));
        }

        #[test]
        fn never_panics(text in "[\\[\\]{}\",:0-9eE.\\\\utrfn +-]{0,60}") {
            if let Some(value) = Value::read(&text)
                && let Ok(theirs) = serde_json::from_str(&text)
            {
                prop_assert!(same(&value, &theirs));
            }
        }
    }
}
