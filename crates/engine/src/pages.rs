//! `Pages`: which pages of the K/V cache are free, how many sessions share each of the others, and which of them can be
//! found again by name.
//!
//! A page is *used* (referred to), *cached* (named, no longer referred to, found until somebody needs the room), or
//! empty. Sessions let their pages go from the last to the first, and whoever refers to a page refers to all before it; so
//! in the order of their release a page always comes after those that continue it, and taking the oldest cached page takes
//! a leaf of the tree of prefixes: what is left can still be reached.

use std::collections::HashMap;

use crate::prefix::PageHash;

/// Page ids below a fixed count.
#[derive(Debug)]
pub struct Pages {
    /// A stack: the page let go last is taken first, while it may still be in a cache.
    empty: Vec<u32>,
    references: Vec<u32>,
    names: Vec<Option<PageHash>>,
    by_name: HashMap<PageHash, u32>,
    cached: Recency,
}

impl Pages {
    pub fn new(count: usize) -> Self {
        let ids = u32::try_from(count).ok().filter(|&count| count < NONE).expect("page ids are 32 bits");
        Self {
            empty: (0..ids).rev().collect(),
            references: vec![0; count],
            names: vec![None; count],
            by_name: HashMap::with_capacity(count),
            cached: Recency::new(count),
        }
    }

    pub fn total(&self) -> usize {
        self.references.len()
    }

    /// Pages that can be taken: empty or cached.
    pub fn free(&self) -> usize {
        self.empty.len() + self.cached.len
    }

    /// Pages that nobody refers to and that can be found by name.
    pub fn cached(&self) -> usize {
        self.cached.len
    }

    /// A free page, now referred to once. An empty one, else the cached one that was let go longest ago.
    pub fn take(&mut self) -> Option<u32> {
        let page = match self.empty.pop() {
            Some(page) => page,
            None => {
                let page = self.cached.oldest()?;
                self.cached.remove(page);
                let name = self.names[page as usize].take().expect("a cached page has a name");
                self.by_name.remove(&name);
                page
            }
        };
        self.references[page as usize] = 1;
        Some(page)
    }

    /// One more reference to a page that is used or cached.
    pub fn share(&mut self, page: u32) {
        let references = &mut self.references[page as usize];
        if *references == 0 {
            assert!(self.names[page as usize].is_some(), "page {page} is empty");
            self.cached.remove(page);
        }
        *references += 1;
    }

    /// One reference less. After the last one the page is cached if it has a name, else empty.
    pub fn release(&mut self, page: u32) {
        let references = &mut self.references[page as usize];
        *references = references.checked_sub(1).expect("a page is released as often as it was taken");
        if *references == 0 {
            match self.names[page as usize] {
                Some(_) => self.cached.push(page),
                None => self.empty.push(page),
            }
        }
    }

    /// Names a used page, which will not be written to any more. If there is a page of that name already, the caller's
    /// reference moves to it. Returns the page that has the name.
    pub fn name(&mut self, page: u32, name: PageHash) -> u32 {
        assert!(self.references[page as usize] > 0, "page {page} is not used");
        match self.by_name.get(&name) {
            Some(&same) if same == page => page,
            Some(&same) => {
                self.share(same);
                self.release(page);
                same
            }
            None => {
                assert!(self.names[page as usize].is_none(), "page {page} has another name");
                self.names[page as usize] = Some(name);
                self.by_name.insert(name, page);
                page
            }
        }
    }

    /// The page of this name, used or cached.
    pub fn find(&self, name: &PageHash) -> Option<u32> {
        self.by_name.get(name).copied()
    }

    /// Forgets all names: what pages hold can not be trusted any more.
    pub fn forget(&mut self) {
        self.by_name.clear();
        self.names.fill(None);
        while let Some(page) = self.cached.oldest() {
            self.cached.remove(page);
            self.empty.push(page);
        }
    }

    pub fn references(&self, page: u32) -> u32 {
        self.references[page as usize]
    }

    pub fn is_named(&self, page: u32) -> bool {
        self.names[page as usize].is_some()
    }
}

/// No page.
const NONE: u32 = u32::MAX;

/// Cached pages in the order of their release: a list whose links lie in arrays, so that nothing is allocated.
#[derive(Debug)]
struct Recency {
    /// Before and after each page in the list.
    links: Vec<[u32; 2]>,
    /// The oldest and the newest.
    ends: [u32; 2],
    len: usize,
}

impl Recency {
    fn new(pages: usize) -> Self {
        Self { links: vec![[NONE; 2]; pages], ends: [NONE; 2], len: 0 }
    }

    fn oldest(&self) -> Option<u32> {
        Some(self.ends[0]).filter(|&page| page != NONE)
    }

    fn push(&mut self, page: u32) {
        let newest = self.ends[1];
        self.links[page as usize] = [newest, NONE];
        match newest {
            NONE => self.ends[0] = page,
            before => self.links[before as usize][1] = page,
        }
        self.ends[1] = page;
        self.len += 1;
    }

    fn remove(&mut self, page: u32) {
        let [before, after] = self.links[page as usize];
        match before {
            NONE => self.ends[0] = after,
            page => self.links[page as usize][1] = after,
        }
        match after {
            NONE => self.ends[1] = before,
            page => self.links[page as usize][0] = before,
        }
        self.len -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(id: u8) -> PageHash {
        PageHash([id; 32])
    }

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

    #[test]
    fn a_named_page_is_found_until_its_room_is_needed_and_the_oldest_goes_first() {
        let mut pages = Pages::new(3);
        let [a, b, c] = [(); 3].map(|()| pages.take().unwrap());
        for (page, id) in [(a, 1), (b, 2), (c, 3)] {
            assert_eq!(pages.name(page, name(id)), page);
        }
        for page in [b, a, c] {
            pages.release(page);
        }
        assert_eq!((pages.free(), pages.cached()), (3, 3));
        pages.share(b); // used again, and let go last
        assert_eq!((pages.free(), pages.cached()), (2, 2));
        pages.release(b);
        assert_eq!(pages.take(), Some(a));
        assert_eq!([1, 2, 3].map(|id| pages.find(&name(id))), [None, Some(b), Some(c)]);
        assert_eq!([pages.take(), pages.take(), pages.take()], [Some(c), Some(b), None]);
        assert_eq!(pages.find(&name(2)), None);
    }

    #[test]
    fn of_two_pages_with_one_name_the_first_is_kept() {
        let mut pages = Pages::new(2);
        let [a, b] = [(); 2].map(|()| pages.take().unwrap());
        pages.name(a, name(1));
        assert_eq!(pages.name(a, name(1)), a);
        assert_eq!(pages.name(b, name(1)), a);
        assert_eq!((pages.references(a), pages.references(b), pages.free()), (2, 0, 1));
    }

    #[test]
    fn forgotten_names_are_not_found_and_their_pages_are_empty() {
        let mut pages = Pages::new(2);
        let [a, b] = [(); 2].map(|()| pages.take().unwrap());
        pages.name(a, name(1));
        pages.name(b, name(2));
        pages.release(a);
        pages.forget();
        assert_eq!((pages.find(&name(1)), pages.find(&name(2))), (None, None));
        assert_eq!((pages.free(), pages.cached()), (1, 0));
        pages.release(b);
        assert_eq!((pages.free(), pages.cached()), (2, 0));
    }
}
