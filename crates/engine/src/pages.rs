//! `Pages`: which pages of the K/V cache are free, and how many sessions share each of the others.

/// Page ids below a fixed count. A page is either free or referred to at least once.
#[derive(Debug)]
pub struct Pages {
    /// A stack: the page let go last is taken first, while it may still be in a cache.
    free: Vec<u32>,
    references: Vec<u32>,
}

impl Pages {
    pub fn new(count: usize) -> Self {
        let count = u32::try_from(count).expect("page ids are 32 bits");
        Self { free: (0..count).rev().collect(), references: vec![0; count as usize] }
    }

    pub fn total(&self) -> usize {
        self.references.len()
    }

    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// A free page, now referred to once.
    pub fn take(&mut self) -> Option<u32> {
        let page = self.free.pop()?;
        self.references[page as usize] = 1;
        Some(page)
    }

    /// One more reference to a page in use.
    pub fn share(&mut self, page: u32) {
        let references = &mut self.references[page as usize];
        assert!(*references > 0, "page {page} is free");
        *references += 1;
    }

    /// One reference less; the last one frees the page.
    pub fn release(&mut self, page: u32) {
        let references = &mut self.references[page as usize];
        *references = references.checked_sub(1).expect("a page is released as often as it was taken");
        if *references == 0 {
            self.free.push(page);
        }
    }

    pub fn references(&self, page: u32) -> u32 {
        self.references[page as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shared_page_is_free_only_after_its_last_release() {
        let mut pages = Pages::new(2);
        let page = pages.take().unwrap();
        pages.share(page);
        pages.release(page);
        assert_eq!((pages.free(), pages.references(page)), (1, 1));
        pages.release(page);
        assert_eq!(pages.free(), 2);
    }

    #[test]
    fn an_empty_cache_gives_no_page() {
        let mut pages = Pages::new(1);
        assert!(pages.take().is_some());
        assert_eq!(pages.take(), None);
        assert_eq!(Pages::new(0).take(), None);
    }

    #[test]
    #[should_panic(expected = "released as often")]
    fn releasing_a_free_page_is_our_mistake() {
        let mut pages = Pages::new(1);
        let page = pages.take().unwrap();
        pages.release(page);
        pages.release(page);
    }
}
