//! Lists that are read only up to a limit, so that a line of many small elements does not become far more memory than it has
//! bytes.

use std::fmt;
use std::marker::PhantomData;

use serde::Deserialize;
use serde::de::{Deserializer, Error, SeqAccess, Visitor};

/// At most `MAX` elements: for `deserialize_with`.
pub(super) fn list<'de, const MAX: usize, T: Deserialize<'de>, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Vec<T>, D::Error> {
    deserializer.deserialize_seq(ListVisitor::<MAX, T>(PhantomData))
}

struct ListVisitor<const MAX: usize, T>(PhantomData<T>);

impl<'de, const MAX: usize, T: Deserialize<'de>> Visitor<'de> for ListVisitor<MAX, T> {
    type Value = Vec<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a list of at most {MAX}")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<Vec<T>, A::Error> {
        let mut list = Vec::new();
        while let Some(element) = elements.next_element()? {
            if list.len() == MAX {
                return Err(A::Error::invalid_length(MAX + 1, &self));
            }
            list.push(element);
        }
        Ok(list)
    }
}
