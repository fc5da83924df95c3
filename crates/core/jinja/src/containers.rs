//! Texts, lists and dicts: shared, never changed, and charged for their memory. Builders grow them within the limits.

use super::error::Error;
use super::meter::{Charge, Meter};
use super::value::Value;
use std::borrow::Borrow;
use std::collections::HashMap;
use std::hash::{Hash, Hasher};
use std::ops::Deref;
use std::rc::Rc;
use std::sync::Arc;

/// The memory of a value within a list, of an entry of a dict's index, and of an allocation besides its contents. The index
/// grows by doubling, so half of it may be empty.
const VALUE_BYTES: usize = size_of::<Value>();
const INDEX_BYTES: usize = 2 * (size_of::<(Key, usize)>() + 8);
pub(super) const OBJECT_BYTES: usize = 96;

/// Text that is shared, not copied.
#[derive(Clone, Debug)]
pub(crate) struct Text(SharedText);

#[derive(Clone, Debug)]
enum SharedText {
    /// Text of the template itself.
    Literal(Arc<str>),
    Owned(Rc<OwnedText>),
}

#[derive(Debug)]
struct OwnedText {
    text: String,
    _charge: Charge,
}

impl Text {
    /// A text that the template itself contains.
    pub fn literal(text: &Arc<str>) -> Self {
        Self(SharedText::Literal(Arc::clone(text)))
    }

    /// Takes over a text of the caller.
    pub fn owned(meter: &Rc<Meter>, text: String) -> Result<Self, Error> {
        let charge = meter.charge(OBJECT_BYTES + text.len())?;
        Ok(Self(SharedText::Owned(Rc::new(OwnedText { text, _charge: charge }))))
    }
}

impl Deref for Text {
    type Target = str;

    fn deref(&self) -> &str {
        match &self.0 {
            SharedText::Literal(text) => text,
            SharedText::Owned(owned) => &owned.text,
        }
    }
}

impl Borrow<str> for Text {
    fn borrow(&self) -> &str {
        self
    }
}

impl PartialEq for Text {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl Eq for Text {}

impl Hash for Text {
    fn hash<H: Hasher>(&self, state: &mut H) {
        str::hash(self, state);
    }
}

/// A text that grows within the limits.
#[derive(Debug)]
pub(crate) struct TextBuilder {
    text: String,
    charge: Charge,
}

impl TextBuilder {
    pub fn new(meter: &Rc<Meter>) -> Result<Self, Error> {
        Ok(Self { text: String::new(), charge: meter.charge(OBJECT_BYTES)? })
    }

    pub fn push_str(&mut self, text: &str) -> Result<(), Error> {
        self.repeat(text, 1)
    }

    pub fn push(&mut self, character: char) -> Result<(), Error> {
        self.push_str(character.encode_utf8(&mut [0; 4]))
    }

    /// Appends `text` this many times.
    pub fn repeat(&mut self, text: &str, count: usize) -> Result<(), Error> {
        let more = text.len().saturating_mul(count);
        self.charge.meter().read(more)?;
        let (length, capacity) = (self.text.len(), self.text.capacity());
        if more > capacity - length {
            let wanted = length.saturating_add(more).max(capacity + capacity / 2);
            self.charge.grow(wanted - capacity)?;
            self.text.reserve_exact(wanted - length);
        }
        if !text.is_empty() {
            (0..count).for_each(|_| self.text.push_str(text));
        }
        Ok(())
    }

    pub fn as_str(&self) -> &str {
        &self.text
    }

    pub fn meter(&self) -> &Rc<Meter> {
        self.charge.meter()
    }

    pub fn into_string(self) -> String {
        self.text
    }

    pub fn finish(self) -> Value {
        let Self { text, charge } = self;
        Value::Str(Text(SharedText::Owned(Rc::new(OwnedText { text, _charge: charge }))))
    }
}

/// A list or a tuple.
#[derive(Clone, Debug)]
pub(crate) struct List(Rc<ListData>);

#[derive(Debug)]
struct ListData {
    items: Vec<Value>,
    is_tuple: bool,
    depth: u32,
    _charge: Charge,
}

impl List {
    pub fn is_tuple(&self) -> bool {
        self.0.is_tuple
    }

    pub fn depth(&self) -> u32 {
        self.0.depth
    }
}

impl Deref for List {
    type Target = [Value];

    fn deref(&self) -> &[Value] {
        &self.0.items
    }
}

/// A list that grows within the limits.
pub(crate) struct ListBuilder {
    items: Vec<Value>,
    depth: u32,
    charge: Charge,
}

impl ListBuilder {
    pub fn new(meter: &Rc<Meter>) -> Result<Self, Error> {
        Ok(Self { items: Vec::new(), depth: 1, charge: meter.charge(OBJECT_BYTES)? })
    }

    pub fn push(&mut self, value: Value) -> Result<(), Error> {
        self.charge.meter().steps(1)?;
        self.depth = self.depth.max(value.depth_within()?);
        if self.items.len() == self.items.capacity() {
            let more = (self.items.len() / 2).max(4);
            self.charge.grow(more * VALUE_BYTES)?;
            self.items.reserve_exact(more);
        }
        self.items.push(value);
        Ok(())
    }

    pub fn extend(&mut self, values: impl IntoIterator<Item = Value>) -> Result<(), Error> {
        values.into_iter().try_for_each(|value| self.push(value))
    }

    pub fn items(&self) -> &[Value] {
        &self.items
    }

    pub fn finish(self) -> Value {
        self.into_value(false)
    }

    pub fn finish_tuple(self) -> Value {
        self.into_value(true)
    }

    fn into_value(self, is_tuple: bool) -> Value {
        let Self { items, depth, charge } = self;
        Value::List(List(Rc::new(ListData { items, is_tuple, depth, _charge: charge })))
    }
}

/// A dict, in the order of insertion.
#[derive(Clone, Debug)]
pub(crate) struct Dict(Rc<DictData>);

#[derive(Debug)]
struct DictData {
    entries: Entries,
    depth: u32,
    _charge: Charge,
}

/// Dicts with more entries are indexed.
const SMALL_DICT_MAX: usize = 8;

#[derive(Debug, Default)]
struct Entries {
    list: Vec<(Value, Value)>,
    /// Empty for a small dict.
    index: HashMap<Key, usize>,
}

impl Entries {
    fn position(&self, key: &Key) -> Option<usize> {
        match self.list.len() {
            ..=SMALL_DICT_MAX => self.list.iter().position(|(other, _)| key.is(other)),
            _ => self.index.get(key).copied(),
        }
    }

    /// Appends an entry whose key is new.
    fn push(&mut self, key: Key, entry: (Value, Value), charge: &mut Charge) -> Result<(), Error> {
        let length = self.list.len();
        if length == self.list.capacity() {
            let more = (length / 2).max(4);
            charge.grow(2 * more * VALUE_BYTES)?;
            self.list.reserve_exact(more);
        }
        if length == SMALL_DICT_MAX {
            charge.grow(length * INDEX_BYTES)?;
            let keys = self.list.iter().map(|(key, _)| Key::new(key));
            self.index.extend(keys.enumerate().filter_map(|(at, key)| Some((key?, at))));
        }
        if length >= SMALL_DICT_MAX {
            charge.grow(INDEX_BYTES)?;
            self.index.insert(key, length);
        }
        self.list.push(entry);
        Ok(())
    }
}

/// What a dict is indexed by. Numbers that are equal are one key.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Key {
    None,
    Int(i128),
    Float(u64),
    Str(Text),
}

impl Key {
    fn new(value: &Value) -> Option<Self> {
        Some(match value {
            Value::None => Self::None,
            Value::Bool(value) => Self::Int((*value).into()),
            Value::Int(value) => Self::Int(*value),
            Value::Float(value) if value.fract() == 0.0 && value.abs() < 1e30 => Self::Int(*value as i128),
            Value::Float(value) => Self::Float(value.to_bits()),
            Value::Str(text) => Self::Str(text.clone()),
            _ => return None,
        })
    }

    fn is(&self, value: &Value) -> bool {
        match (self, value) {
            (Self::Str(key), Value::Str(text)) => key == text,
            (Self::Str(_), _) | (_, Value::Str(_)) => false,
            _ => Self::new(value).as_ref() == Some(self),
        }
    }
}

impl Dict {
    pub fn depth(&self) -> u32 {
        self.0.depth
    }

    pub fn entries(&self) -> &[(Value, Value)] {
        &self.0.entries.list
    }

    pub fn get(&self, key: &Value) -> Option<&Value> {
        let at = self.0.entries.position(&Key::new(key)?)?;
        Some(&self.0.entries.list[at].1)
    }
}

/// A dict that grows within the limits.
pub(crate) struct DictBuilder {
    entries: Entries,
    depth: u32,
    charge: Charge,
}

impl DictBuilder {
    pub fn new(meter: &Rc<Meter>) -> Result<Self, Error> {
        Ok(Self { entries: Entries::default(), depth: 1, charge: meter.charge(OBJECT_BYTES)? })
    }

    /// The last of two values for one key counts.
    pub fn insert(&mut self, key: Value, value: Value) -> Result<(), Error> {
        self.charge.meter().read(key.as_str().map_or(0, str::len))?;
        let index = Key::new(&key).ok_or_else(|| Error::failed(format!("a {} cannot be a key", key.type_name())))?;
        self.depth = self.depth.max(value.depth_within()?);
        match self.entries.position(&index) {
            Some(at) => self.entries.list[at].1 = value,
            None => self.entries.push(index, (key, value), &mut self.charge)?,
        }
        Ok(())
    }

    pub fn finish(self) -> Value {
        let Self { entries, depth, charge } = self;
        Value::Dict(Dict(Rc::new(DictData { entries, depth, _charge: charge })))
    }
}
