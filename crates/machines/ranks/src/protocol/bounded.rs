//! `BoundedVec`: a list that is deserialised only up to a limit, so that a line of many small elements does not take
//! far more memory than it has bytes.

use std::fmt;
use std::ops::{Deref, DerefMut};

use serde::de::{DeserializeSeed, Deserializer, Error, SeqAccess, Visitor};
use serde::{Deserialize, Serialize};

/// Deserialising fails beyond `MAX` elements. Deserialising in place reuses its memory, and that of its elements.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct BoundedVec<T, const MAX: usize>(Vec<T>);

impl<T, const MAX: usize> Default for BoundedVec<T, MAX> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T, const MAX: usize> Deref for BoundedVec<T, MAX> {
    type Target = Vec<T>;

    fn deref(&self) -> &Vec<T> {
        &self.0
    }
}

impl<T, const MAX: usize> DerefMut for BoundedVec<T, MAX> {
    fn deref_mut(&mut self) -> &mut Vec<T> {
        &mut self.0
    }
}

impl<T, const MAX: usize> From<Vec<T>> for BoundedVec<T, MAX> {
    fn from(list: Vec<T>) -> Self {
        Self(list)
    }
}

impl<T, const MAX: usize> FromIterator<T> for BoundedVec<T, MAX> {
    fn from_iter<I: IntoIterator<Item = T>>(elements: I) -> Self {
        Self(elements.into_iter().collect())
    }
}

impl<'de, T: Deserialize<'de>, const MAX: usize> Deserialize<'de> for BoundedVec<T, MAX> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut list = Self::default();
        Self::deserialize_in_place(deserializer, &mut list)?;
        Ok(list)
    }

    fn deserialize_in_place<D: Deserializer<'de>>(deserializer: D, place: &mut Self) -> Result<(), D::Error> {
        deserializer.deserialize_seq(ListVisitor::<T, MAX>(&mut place.0))
    }
}

struct ListVisitor<'a, T, const MAX: usize>(&'a mut Vec<T>);

impl<'de, T: Deserialize<'de>, const MAX: usize> Visitor<'de> for ListVisitor<'_, T, MAX> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a list of at most {MAX}")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<(), A::Error> {
        let mut count = 0;
        while count < MAX {
            let is_read = match self.0.get_mut(count) {
                Some(place) => elements.next_element_seed(InPlace(place))?.is_some(),
                None => elements.next_element()?.map(|element| self.0.push(element)).is_some(),
            };
            if !is_read {
                self.0.truncate(count);
                return Ok(());
            }
            count += 1;
        }
        match elements.next_element::<T>()? {
            Some(_) => Err(A::Error::invalid_length(MAX + 1, &self)),
            None => Ok(()),
        }
    }
}

/// Deserialises a value in place.
struct InPlace<'a, T>(&'a mut T);

impl<'de, T: Deserialize<'de>> DeserializeSeed<'de> for InPlace<'_, T> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        T::deserialize_in_place(deserializer, self.0)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::*;

    type Lists = BoundedVec<BoundedVec<u32, 2>, 3>;

    fn read_into(json: &str, lists: &mut Lists) -> serde_json::Result<()> {
        Lists::deserialize_in_place(&mut serde_json::Deserializer::from_str(json), lists)
    }

    #[test]
    fn a_list_is_read_over_another_in_its_memory() {
        let mut lists: Lists = serde_json::from_str("[[1,2],[3,4],[5,6]]").unwrap();
        let memory = lists[0].as_ptr();
        for json in ["[[7]]", "[[1,2],[3]]", "[[],[],[9,9]]", "[[1]]"] {
            read_into(json, &mut lists).unwrap();
            assert_eq!(serde_json::to_string(&lists).unwrap(), json);
            assert_eq!(lists[0].as_ptr(), memory);
        }
        read_into("[]", &mut lists).unwrap();
        assert!(lists.is_empty());
    }

    #[test]
    fn a_list_that_is_too_long_is_refused() {
        for json in ["[[],[],[],[]]", "[[1,2,3]]"] {
            assert!(serde_json::from_str::<Lists>(json).is_err(), "{json}");
            assert!(read_into(json, &mut Lists::default()).is_err(), "{json}");
        }
    }
}
