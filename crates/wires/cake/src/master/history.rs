//! `ActivationHistory`: what was sent for the tokens of all sessions, by page of the session table, so that a sequence can be
//! sent again.
//!
//! It takes as much memory as the activations of all tokens that the table has pages for, once they were used.

use kernels::PAGE_TOKENS;

pub(super) struct ActivationHistory {
    hidden: usize,
    /// `[PAGE_TOKENS, hidden]` each. `None` if the page was never used.
    pages: Vec<Option<Box<[f32]>>>,
}

impl ActivationHistory {
    pub fn new(hidden: usize, pages: usize) -> Self {
        Self { hidden, pages: vec![None; pages] }
    }

    /// Notes `rows`, `[rows, hidden]`, of the tokens from `position` on. `table` has the session's pages.
    pub fn write(&mut self, table: &[u32], position: usize, rows: &[f32]) {
        for (index, row) in rows.chunks_exact(self.hidden).enumerate() {
            let (page, at) = self.place(table, position + index);
            let page = self.pages[page].get_or_insert_with(|| vec![0.0; PAGE_TOKENS * row.len()].into());
            page[at..at + row.len()].copy_from_slice(row);
        }
    }

    /// The rows of `count` tokens from `position` on.
    pub fn read(&self, table: &[u32], position: usize, count: usize) -> Option<Vec<f32>> {
        let mut rows = Vec::with_capacity(count * self.hidden);
        for position in position..position + count {
            let (page, at) = self.place(table, position);
            rows.extend_from_slice(&self.pages[page].as_ref()?[at..at + self.hidden]);
        }
        Some(rows)
    }

    pub fn clear(&mut self) {
        self.pages.fill(None);
    }

    fn place(&self, table: &[u32], position: usize) -> (usize, usize) {
        (table[position / PAGE_TOKENS] as usize, position % PAGE_TOKENS * self.hidden)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_found_again_across_pages() {
        let mut history = ActivationHistory::new(2, 4);
        let table = [3, 1, 0];
        let rows: Vec<f32> = (0..2 * (PAGE_TOKENS as u16 + 5)).map(f32::from).collect();
        history.write(&table, 0, &rows[..6]);
        history.write(&table, 3, &rows[6..]);
        assert_eq!(history.read(&table, 0, PAGE_TOKENS + 5).unwrap(), rows);
        // Another session shares the first page.
        assert_eq!(history.read(&[3, 2], 0, PAGE_TOKENS).unwrap(), rows[..2 * PAGE_TOKENS]);
        assert_eq!(history.read(&[3, 2], 0, PAGE_TOKENS + 1), None);
        history.clear();
        assert_eq!(history.read(&table, 0, 1), None);
    }
}
