//! How the rows of the table of keys read and store a value. What a range says in words is decided here once for all keys of a kind.

/// The value of a key with the range `on, off (or 1, 0)`.
pub(super) fn switch(value: &str) -> Option<bool> {
    match value {
        "on" | "1" => Some(true),
        "off" | "0" => Some(false),
        _ => None,
    }
}

/// Stores what could be read.
pub(super) fn store<T>(place: &mut T, value: Option<T>) -> Result<(), ()> {
    *place = value.ok_or(())?;
    Ok(())
}

/// Stores what could be read, where "not given" is a value of its own.
pub(super) fn store_some<T>(place: &mut Option<T>, value: Option<T>) -> Result<(), ()> {
    *place = Some(value.ok_or(())?);
    Ok(())
}
