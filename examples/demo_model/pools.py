"""Word pools and facts for the demo model's synthetic chats. All text here is our own; Apache-2.0."""

# ruff: noqa: RUF001, SIM905 -- word lists read better as text, and odd characters are wanted

from __future__ import annotations

import random
import zlib

# Every member of the United Nations and its capital (one per country; seats of government are not listed).
CAPITALS: dict[str, str] = dict(
    pair.split("=")
    for pair in """
Afghanistan=Kabul|Albania=Tirana|Algeria=Algiers|Andorra=Andorra la Vella|Angola=Luanda|
Antigua and Barbuda=Saint John's|Argentina=Buenos Aires|Armenia=Yerevan|Australia=Canberra|Austria=Vienna|
Azerbaijan=Baku|the Bahamas=Nassau|Bahrain=Manama|Bangladesh=Dhaka|Barbados=Bridgetown|Belarus=Minsk|
Belgium=Brussels|Belize=Belmopan|Benin=Porto-Novo|Bhutan=Thimphu|Bolivia=Sucre|
Bosnia and Herzegovina=Sarajevo|Botswana=Gaborone|Brazil=Brasília|Brunei=Bandar Seri Begawan|Bulgaria=Sofia|
Burkina Faso=Ouagadougou|Burundi=Gitega|Cambodia=Phnom Penh|Cameroon=Yaoundé|Canada=Ottawa|Cape Verde=Praia|
the Central African Republic=Bangui|Chad=N'Djamena|Chile=Santiago|China=Beijing|Colombia=Bogotá|
the Comoros=Moroni|the Republic of the Congo=Brazzaville|the Democratic Republic of the Congo=Kinshasa|
Costa Rica=San José|Croatia=Zagreb|Cuba=Havana|Cyprus=Nicosia|the Czech Republic=Prague|Denmark=Copenhagen|
Djibouti=Djibouti City|Dominica=Roseau|the Dominican Republic=Santo Domingo|Ecuador=Quito|Egypt=Cairo|
El Salvador=San Salvador|Equatorial Guinea=Malabo|Eritrea=Asmara|Estonia=Tallinn|Eswatini=Mbabane|
Ethiopia=Addis Ababa|Fiji=Suva|Finland=Helsinki|France=Paris|Gabon=Libreville|the Gambia=Banjul|
Georgia=Tbilisi|Germany=Berlin|Ghana=Accra|Greece=Athens|Grenada=Saint George's|Guatemala=Guatemala City|
Guinea=Conakry|Guinea-Bissau=Bissau|Guyana=Georgetown|Haiti=Port-au-Prince|Honduras=Tegucigalpa|
Hungary=Budapest|Iceland=Reykjavík|India=New Delhi|Indonesia=Jakarta|Iran=Tehran|Iraq=Baghdad|Ireland=Dublin|
Israel=Jerusalem|Italy=Rome|Ivory Coast=Yamoussoukro|Jamaica=Kingston|Japan=Tokyo|Jordan=Amman|
Kazakhstan=Astana|Kenya=Nairobi|Kiribati=South Tarawa|North Korea=Pyongyang|South Korea=Seoul|
Kuwait=Kuwait City|Kyrgyzstan=Bishkek|Laos=Vientiane|Latvia=Riga|Lebanon=Beirut|Lesotho=Maseru|
Liberia=Monrovia|Libya=Tripoli|Liechtenstein=Vaduz|Lithuania=Vilnius|Luxembourg=Luxembourg City|
Madagascar=Antananarivo|Malawi=Lilongwe|Malaysia=Kuala Lumpur|the Maldives=Malé|Mali=Bamako|Malta=Valletta|
the Marshall Islands=Majuro|Mauritania=Nouakchott|Mauritius=Port Louis|Mexico=Mexico City|
Micronesia=Palikir|Moldova=Chișinău|Monaco=Monaco City|Mongolia=Ulaanbaatar|Montenegro=Podgorica|Morocco=Rabat|
Mozambique=Maputo|Myanmar=Naypyidaw|Namibia=Windhoek|Nauru=Yaren|Nepal=Kathmandu|the Netherlands=Amsterdam|
New Zealand=Wellington|Nicaragua=Managua|Niger=Niamey|Nigeria=Abuja|North Macedonia=Skopje|Norway=Oslo|
Oman=Muscat|Pakistan=Islamabad|Palau=Ngerulmud|Panama=Panama City|Papua New Guinea=Port Moresby|
Paraguay=Asunción|Peru=Lima|the Philippines=Manila|Poland=Warsaw|Portugal=Lisbon|Qatar=Doha|Romania=Bucharest|
Russia=Moscow|Rwanda=Kigali|Saint Kitts and Nevis=Basseterre|Saint Lucia=Castries|
Saint Vincent and the Grenadines=Kingstown|Samoa=Apia|San Marino=San Marino City|
São Tomé and Príncipe=São Tomé|Saudi Arabia=Riyadh|Senegal=Dakar|Serbia=Belgrade|Seychelles=Victoria|
Sierra Leone=Freetown|Singapore=Singapore City|Slovakia=Bratislava|Slovenia=Ljubljana|
the Solomon Islands=Honiara|Somalia=Mogadishu|South Africa=Pretoria|South Sudan=Juba|Spain=Madrid|
Sri Lanka=Sri Jayawardenepura Kotte|Sudan=Khartoum|Suriname=Paramaribo|Sweden=Stockholm|Switzerland=Bern|
Syria=Damascus|Tajikistan=Dushanbe|Tanzania=Dodoma|Thailand=Bangkok|Timor-Leste=Dili|Togo=Lomé|
Tonga=Nuku'alofa|Trinidad and Tobago=Port of Spain|Tunisia=Tunis|Turkey=Ankara|Turkmenistan=Ashgabat|
Tuvalu=Funafuti|Uganda=Kampala|Ukraine=Kyiv|the United Arab Emirates=Abu Dhabi|the United Kingdom=London|
the United States=Washington, D.C.|Uruguay=Montevideo|Uzbekistan=Tashkent|Vanuatu=Port Vila|
Venezuela=Caracas|Vietnam=Hanoi|Yemen=Sanaa|Zambia=Lusaka|Zimbabwe=Harare
""".replace("\n", "").split("|")
)
COUNTRIES = list(CAPITALS)

DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
MONTH_DAYS = [31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31]
NUMBER_WORDS = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
seventeen eighteen nineteen twenty""".split()
ORDINALS = "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth".split()

_OPPOSITES = """hot cold|big small|up down|left right|day night|black white|open closed|fast slow|happy sad|
young old|rich poor|hard soft|heavy light|high low|long short|wet dry|full empty|early late|near far|clean dirty|
strong weak|loud quiet|sweet sour|thick thin|wide narrow|deep shallow|good bad|true false|begin end|win lose|
buy sell|push pull|give take|come go|in out|on off|above below|before after|always never|love hate|friend enemy|
north south|east west|inside outside|front back|top bottom|first last|more less|many few|asleep awake|alive dead|
brave afraid|bright dark|cheap expensive|calm stormy|easy difficult|laugh cry|male female|peace war|polite rude|
remember forget|right wrong|rough smooth|safe dangerous|save spend|sharp blunt|success failure|summer winter|
tall tiny|tight loose|arrive leave|ask answer|build destroy|kind cruel|lazy busy|modern ancient|noisy silent|
question reply|raise lower|send receive|sink float|start stop|strange normal|whisper shout|yes no"""
_SEEN: set[str] = set()
OPPOSITES: list[tuple[str, str]] = []
for _pair in _OPPOSITES.replace("\n", "").split("|"):
    _a, _b = _pair.split()
    if _a not in _SEEN and _b not in _SEEN:
        OPPOSITES.append((_a, _b))
        _SEEN.update((_a, _b))

NOUNS = """apple bridge candle door engine feather garden hammer island jacket kettle ladder mirror needle orange
pencil quilt river saddle table umbrella valley window yard anchor basket carpet dragon elephant forest guitar
helmet iron jungle kitchen lantern mountain notebook ocean piano queen ribbon saucer tiger uncle village wagon
axe barrel castle desert eagle fountain glove harbour insect jewel key lemon market nest oven parrot rocket
shovel train violin wheel barn button coin drum flag goat hat lamp moon nail owl plate rope ship tent vase well
bell book bottle box brush cake chair clock cloud cup desk dish field fish flute fork frog gate glass hill horse
house jar kite knife leaf map melon mill mouse nut pear pillow pipe plum pond pot purse ring road roof rose sail
scarf shelf shoe snow sock spoon star stone stool street sugar sword thread tower toy tree tunnel wall whistle
wolf wood bicycle blanket cabin camera cherry circle copper corner cottage cotton crown dinner doctor farmer
finger flower hotel letter library machine meadow medal monkey museum onion packet paper pepper pocket potato
puzzle rabbit school shadow silver spider spring station summer teacher temple ticket tomato turtle waiter
winter""".split()
ADJECTIVES = """red blue green yellow brown white black purple golden old new small large round square heavy light
wooden bright dark quiet noisy clean dusty broken shiny soft warm cold narrow wide tall short empty full
simple strange gentle lazy clever brave lonely famous hungry thirsty busy curious silent careful honest""".split()
VERBS = """carried found painted repaired sold borrowed hid washed dropped opened followed watched counted moved
kept bought forgot noticed cleaned lifted wrapped burned traded measured guarded returned""".split()
PEOPLE = """baker farmer teacher sailor doctor singer painter driver miner tailor gardener pilot nurse clerk judge
butcher fisherman shepherd carpenter librarian waiter soldier hunter potter weaver miller captain guard student
neighbour stranger king queen boy girl woman man uncle aunt""".split()
PLACES = """harbour market forest river village castle school station bridge garden library tower mill farm museum
hotel kitchen valley island temple lake cave beach bakery workshop square church theatre barn inn""".split()
COLOURS = "red blue green yellow purple orange brown black white pink grey silver golden turquoise violet".split()
ANIMALS = """dog cat horse parrot rabbit hamster turtle goat fox bear owl mouse wolf hedgehog squirrel duck lion
tiger frog crow deer badger otter penguin donkey""".split()
FOODS = """pizza soup bread rice pasta salad cheese pancakes noodles curry stew beans fish dumplings honey
chocolate porridge pie mushrooms potatoes""".split()
ITEMS = """apples bread milk eggs butter cheese rice pasta tomatoes onions potatoes carrots bananas lemons oranges
sugar salt pepper flour coffee tea honey beans soap candles matches paper pens batteries nails rope tape paint
yogurt mushrooms garlic grapes pears plums cherries lettuce spinach""".split()
JOBS = """baker farmer teacher sailor doctor singer painter driver tailor gardener pilot nurse judge carpenter
librarian waiter potter engineer lawyer plumber dentist actor dancer""".split()
NAMES = """Anna Tom Peter Maria John Lucy David Sarah Paul Emma James Julia Mark Laura Simon Nina Oscar Clara Felix
Alice Bruno Carla Diego Elena Frank Greta Hugo Irene Jonas Karin Leo Marta Nora Olga Pablo Rosa Stefan Teresa Victor
Wendy Yusuf Zoe Adam Bella Chloe Daniel Eva Fatima George Hannah Isaac Jack Kate Liam Mia Noah Olivia Ravi Sofia
Theo Uma Vera William Xenia Yara Zack Aisha Boris Chen Dora Emil Fiona Gina Hans Ivan Jana Kofi Lena Mina
Nils""".split()
# told in the chats only, beside NAMES; HELD_NAMES never in training
MORE_NAMES = """Ada Alan Albert Alex Alfred Amy Andrea Andrew Angela Anita Anton Arthur Astrid Ava Barbara Beatrice Ben
Bernard Bert Betty Bill Bob Brian Bridget Carl Carlos Carol Caroline Charles Charlie Chris Christina Cecilia Dan Dean
Deborah Denise Dennis Diana Dmitri Dominic Don Donna Doris Dylan Ed Eddie Edith Edward Eleanor Ella Ellen Ellie Elsa
Emily Eric Erik Esther Ethan Eve Fay Fernando Flora Florence Francis Fred Frederick Gabriel Gary Gerald Gloria Grace
Graham Gus Gustav Hanna Harold Harry Heidi Helen Helena Henry Holly Ian Ida Ines Ingrid Iris Isabel Jacob Jake Jan Jane
Janet Jasmine Jason Jean Jeff Jenny Jerry Jessica Jill Jim Joan Joe Joel Johan Jonathan Jorge Jose Joseph Josh Joy Juan
Judy Karl Kathy Keith Ken Kevin Kim Kurt Lara Larry Lars Laurel Lee Leon Lewis Liam Lily Linda Lisa Lola Lorenzo Louis
Louise Luca Lucas Luis Luke Lydia Maggie Manuel Marco Margaret Marie Marina Mario Marion Martha Martin Mary Matt
Matthew Max May Megan Mei Michael Miguel Mike Mila Milo Miriam Molly Monica Nadia Nancy Natalie Nathan Ned Neil Nick
Nicole Nigel Noel Omar Otto Owen Pam Pat Patricia Patrick Paula Pavel Penny Pete Phil Philip Pia Pierre Polly Rachel
Ralph Ray Rebecca Rex Richard Rita Rob Robert Robin Roger Rolf Roman Ron Ronald Rosie Roy Ruby Rudi Russell Ruth Ryan
Sabrina Sally Sam Samir Samuel Sandra Sandy Sara Scott Sean Sergio Silvia Sonja Sophie Stan Stella Stephen Steve Stuart
Sue Susan Sven Sylvia Tanja Tara Ted Terry Thea Thomas Tim Tina Todd Tony Trudy Ulrich Ursula Valerie Vicky Vincent
Viola Walter Wayne Will Willy Yvonne Zelda Zora Priya Amir Hassan Kenji Yuki Hiro Ling Wei Mehmet Leila Amina Kwame Ade
Rex Bruno Buddy Luna Bello Rocky Fluffy Lucky Daisy Toby""".split()
HELD_NAMES = """Agnes Basil Cyril Dagmar Edwin Faye Gideon Hector Imogen Jasper Konrad Lionel Mabel Norbert Ophelia
Percy Quentin Rupert Sigrid Tabitha Umberto Violet Wilfred Yolanda Zachary Tomoko Farid Nkechi Sanjay Ingemar""".split()
_TAUGHT = {*NAMES, *MORE_NAMES}
WORDS = sorted({*NOUNS, *ADJECTIVES, *VERBS, *PEOPLE, *PLACES, *COLOURS, *ANIMALS, *FOODS, *ITEMS, *_SEEN})
SPELL_WORDS = sorted({*NOUNS, *ADJECTIVES, *COLOURS, *ANIMALS})

_ONSETS = "b c d f g h j k l m n p r s t v w z br cr dr fr gr tr pl sl st th sh ch kn".split()
_VOWELS = "a e i o u a e i o ai ea ou".split()
_CODAS = ["", "", "", "", "n", "r", "l", "s", "m", "t", "k", "nd", "rt"]


def held_out(text: str) -> bool:
    """Whether a made-up word or number belongs to the test set (one in eight), by its hash."""
    return zlib.crc32(text.encode()) % 8 == 0


def made_up(rng: random.Random, test: bool) -> str:
    """A made-up lower-case word of two or three syllables from the wanted half of the split."""
    while True:
        n = 2 if rng.random() < 0.6 else 3
        word = "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(n))
        if held_out(word) == test and not (test and word.capitalize() in _TAUGHT):
            return word


def name(rng: random.Random, test: bool) -> str:
    """A person's or place's name: an ordinary first name or a made-up one."""
    if rng.random() < (0.25 if test else 0.45):
        return rng.choice(HELD_NAMES if test else NAMES if rng.random() < 0.4 else MORE_NAMES)
    return made_up(rng, test).capitalize()


def number(rng: random.Random, test: bool, low: int = 10, high: int = 99999) -> int:
    """A number with uniformly drawn length, from the wanted half of the split."""
    while True:
        digits = rng.randint(len(str(low)), len(str(high)))
        value = rng.randint(max(low, 10 ** (digits - 1)), min(high, 10**digits - 1))
        if held_out(f"n{value}") == test:
            return value


def sentence(rng: random.Random) -> str:
    """One plain sentence from a small grammar."""
    c = rng.choice
    kind = rng.randrange(6)
    if kind == 0:
        return f"The {c(ADJECTIVES)} {c(PEOPLE)} {c(VERBS)} a {c(ADJECTIVES)} {c(NOUNS)} near the {c(PLACES)}."
    if kind == 1:
        return f"On {c(DAYS)} the {c(PEOPLE)} {c(VERBS)} the {c(NOUNS)} and went to the {c(PLACES)}."
    if kind == 2:
        return f"In {c(MONTHS)} {c(NAMES)} {c(VERBS)} {rng.randint(2, 99)} {c(NOUNS)}s for the {c(PEOPLE)}."
    if kind == 3:
        return f"{c(NAMES)} and {c(NAMES)} {c(VERBS)} the {c(ADJECTIVES)} {c(NOUNS)}."
    if kind == 4:
        return f"There was a {c(ADJECTIVES)} {c(NOUNS)} in the {c(PLACES)}, next to a {c(NOUNS)}."
    return f"Nobody knew why the {c(PEOPLE)} of the {c(PLACES)} {c(VERBS)} the {c(NOUNS)}."


_ODD = "äöüéèßñçøåłšžµ°€£§½²→…–“”«»αβγδλπωабвгдежзиклмнопрст日本語中文字한국어😀🚀🌍✓"

_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHJKLMNPQRSTUVWXYZ0123456789-_./"


def passage(rng: random.Random, test: bool, tokens: int) -> str:
    """Text of roughly `tokens` tokens to be copied: sentences, random words, letters, numbers or odd characters."""
    kind = rng.random()
    parts: list[str] = []
    size = 0
    while size < tokens:
        if kind < 0.35:
            part, cost = sentence(rng), 14
        elif kind < 0.65:
            part, cost = rng.choice(WORDS), 2
        elif kind < 0.75:
            part, cost = made_up(rng, test), 4
        elif kind < 0.82:
            part, cost = str(number(rng, test, 0)), 4
        elif kind < 0.88:
            part, cost = "".join(rng.choices(_LETTERS, k=8)), 8
        elif kind < 0.92:
            part, cost = "".join(rng.choices(_ODD, k=rng.randint(1, 4))), 6
        else:
            part, cost = (
                rng.choice(
                    (
                        sentence,
                        lambda r: name(r, test),
                        lambda r: str(r.randint(0, 9999)),
                        lambda r: r.choice(WORDS),
                        lambda r: made_up(r, test) + ",",
                    )
                )(rng),
                5,
            )
        parts.append(part)
        size += cost
    return ("\n" if kind < 0.35 and rng.random() < 0.3 else " ").join(parts)
