"""The words that the demo model knows. All lists were written for this project."""

from collections.abc import Sequence


def _words(text: str) -> list[str]:
    return text.split()


COLORS = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (45, 80, 220),
    "yellow": (240, 215, 40),
    "purple": (140, 50, 170),
    "orange": (245, 140, 30),
    "black": (20, 20, 20),
    "white": (245, 245, 245),
}
"""RGB of the colors of shapes."""

BACKGROUNDS = {
    "gray": (128, 128, 128),
    "pink": (250, 190, 205),
    "light blue": (175, 215, 245),
    "brown": (120, 80, 45),
    "beige": (235, 225, 195),
    "dark gray": (70, 70, 75),
}
"""RGB of the colors that only backgrounds have."""

SHAPES = ["circle", "square", "triangle", "star"]

NAMES = _words("""
Anna Ben Clara David Emma Felix Grace Henry Ida Jack Kate Leo Maya Noah Olga Paul Rosa Sam Tina Victor Wendy Yusuf Zoe
Alice Bruno Chloe Diego Elena Frank Gina Hugo Iris Jonas Lena Marco Nina Oscar Petra Ravi Sofia Tom Uma Walter Amir
Bella Carl Dora Erik Fiona George Hana Ivan Julia Karim Luna Mark Nora Omar Priya Ruth Simon Tara Viola
""")
TOWNS = _words("""
Northfield Ashford Millbrook Riverton Oakdale Stonebridge Greenhill Westport Lakewood Fairview Brookside Redcliff
Silverton Maplewood Harborview Eastgate Pinewood Clearwater Sunnyvale Highland
""")
CITIES = _words("""
Paris London Berlin Madrid Rome Vienna Oslo Tokyo Cairo Lima Delhi Dublin Athens Lisbon Prague Warsaw Seoul Sydney
Toronto Chicago Boston Denver Miami Seattle Amsterdam Brussels Zurich Helsinki Stockholm Copenhagen
""")
ANIMALS = _words("""
fox bear rabbit owl wolf deer mouse cat dog horse cow pig sheep goat duck goose hen frog turtle snake lion tiger
elephant monkey zebra whale shark dolphin eagle crow robin bee ant spider squirrel badger otter hedgehog penguin camel
""")
FRUITS = _words("apple pear plum cherry lemon orange banana grape peach melon mango fig kiwi lime berry apricot")
FOODS = _words("""
bread cheese soup rice pasta cake pie salad egg butter honey milk tea coffee juice water sugar salt fish
""")
OBJECTS = _words("""
key lamp book clock ring coin map rope box drum flute sword shield crown mirror candle ladder basket bottle hammer
kettle blanket pencil bag letter stone feather bell wheel compass telescope umbrella
""")
PLACES = _words("""
gate tower bridge garden library harbor market castle mill school station temple vault cellar kitchen attic forest
cave island farm barn church museum hotel office hospital theater workshop warehouse lighthouse
""")
ADJECTIVES = _words("""
old new small large tall short red green blue quiet noisy dark bright cold warm empty busy hidden broken golden silver
wooden stone iron dusty clean secret famous ancient modern gentle lonely happy heavy light narrow wide north south
east west upper lower inner outer first second third last
""")
JOBS = _words("""
farmer baker teacher doctor sailor painter gardener king queen merchant hunter shepherd carpenter singer soldier
student captain nurse driver tailor writer cook fisherman blacksmith librarian traveler
""")
WEATHER = _words("sunny cloudy rainy windy snowy foggy stormy clear")
DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = _words("January February March April May June July August September October November December")
TOPICS = _words("""
budget trip garden party music science history safety travel design sales health weather food sports
""")
NUMBER_WORDS = _words("zero one two three four five six seven eight nine ten eleven twelve")
VERBS = _words("""
carried dropped painted opened closed cleaned fixed found lost moved washed sold bought borrowed watched admired
counted guarded covered repaired polished lifted ignored described remembered visited
""")
ADVERBS = _words("""
slowly quickly carefully quietly happily gently often never always once again twice together alone
""")
TIMES = [
    "in the morning",
    "in the evening",
    "at noon",
    "at night",
    "after lunch",
    "before dinner",
    "on Sunday",
    "last week",
    "last summer",
    "every day",
    "during the storm",
    "in early spring",
    "at the end of the day",
    "for a long time",
]
COMMON = _words("""
time year people way day thing world life hand part child eye woman man place work week case point company number
group problem fact water room mother area money story month book business issue side kind head house service friend
father power hour game line end member law car city name team minute idea body back parent face level door health
person art war party result change morning reason research girl guy moment air teacher force order paper space ground
form event matter center couple site project activity star table need course oil half situation cost industry figure
street image phone data picture practice piece land product doctor wall patient worker news test movie north love
support technology step baby computer type attention film tree source hair look window culture chance brother energy
period summer floor campus material population call economy medical hospital church risk fire future bank west sport
board run walk read write speak learn build open close start stop move live believe bring happen provide sit stand
lose pay meet include continue set follow create allow add spend grow win offer remember consider appear buy wait
serve send expect stay fall cut reach kill remain suggest raise pass sell require report decide pull apple orange
sword fish light dark blue server client user token cache model prompt python function script program engine memory
cloud rocket planet ocean river mountain valley desert island bridge music guitar piano violin drum dance theater
cinema camera screen keyboard mouse printer robot machine motor wheel battery signal winter spring autumn snow rain
wind storm thunder sun moon sky earth stone metal gold silver copper iron glass wood cotton silk shirt shoe hat coat
dress pocket button needle thread chair desk bed sofa carpet curtain pillow blanket kitchen bedroom garden garage
breakfast lunch dinner sandwich pizza burger potato tomato onion carrot pepper chicken beef pork shrimp noodle sauce
spice chocolate football tennis hockey chess puzzle ticket holiday travel hotel airport station train plane bicycle
truck ship boat harbor market lawyer nurse pilot actor artist writer painter singer engineer scientist manager student
soldier police judge mayor president happy angry tired hungry thirsty brave clever funny lazy polite proud quick quiet
strong weak young fresh sweet bitter sour
""")

VOCABULARY: dict[str, Sequence[object]] = {
    "adjective": ADJECTIVES,
    "adverb": ADVERBS,
    "animal": ANIMALS,
    "common": COMMON,
    "count": NUMBER_WORDS[2:],
    "day": DAYS,
    "food": FOODS,
    "fruit": FRUITS,
    "job": JOBS,
    "month": MONTHS,
    "name": NAMES,
    "number": range(2, 100),
    "object": OBJECTS,
    "place": PLACES,
    "time": TIMES,
    "topic": TOPICS,
    "town": TOWNS,
    "verb": VERBS,
    "weather": WEATHER,
}
"""Replacements of a placeholder such as {name} in a template, see Draws.fill."""
